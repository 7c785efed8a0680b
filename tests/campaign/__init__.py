"""Campaigns: programs that use everything at once, under all faults at once.

A program (program.py, on one host; hosts.py, on emulated ones) is made from one seed: several
drivers (driver.py) with several threads each make random calls (operations.py and what it names);
a model (model.py) knows what each of them must give, or which failures the faults so far explain;
meanwhile faults happen (faults.py). At its end nothing may be left (leaks.py), and nothing may
stand still in between (watching.py).
"""
