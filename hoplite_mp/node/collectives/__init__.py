"""Operations on objects over several hosts: plans carried out."""
