"""The node takes spans from living clients in which nothing is in use."""

import random

from tests.support.shm_host import ShmHost, put_bytes


def test_a_span_that_has_never_been_used(host: ShmHost) -> None:
    client = host.client()
    span = host.give_span(client)
    assert host.node.revoke_span(span)
    assert client.allocate(100) == 0
    host.give_span(client)
    assert client.allocate(100)


def test_a_span_on_its_way_is_not_taken(host: ShmHost) -> None:
    client = host.client()
    span = host.store.lease_span(client.slot)
    assert span is not None
    assert not host.node.revoke_span(span)
    client.add_span(span)
    assert host.node.revoke_span(span)


def test_a_span_that_goes_back_is_not_taken_as_well(host: ShmHost) -> None:
    client = host.client()
    span = host.give_span(client)
    assert client.take_empty_spans() == [span]
    assert not host.node.revoke_span(span)


def test_a_span_that_was_taken_is_not_given_back(host: ShmHost) -> None:
    client = host.client()
    span = host.give_span(client)
    client.give_back(client.allocate(3000))
    assert host.node.revoke_span(span)
    assert client.take_empty_spans() == []


def test_a_block_in_use_keeps_its_span(host: ShmHost) -> None:
    client = host.client()
    span = host.give_span(client)
    blocks = [client.allocate(3000) for _ in range(5)]
    for at in blocks[:-1]:
        client.give_back(at)
    assert not host.node.revoke_span(span)
    client.give_back(blocks[-1])
    assert host.node.revoke_span(span)
    assert client.allocate(3000) == 0


def test_what_nobody_has_collected_yet_does_not_keep_it(host: ShmHost) -> None:
    client = host.client()
    span = host.give_span(client)
    oid = put_bytes(client, b"x" * 500)
    client.release(oid)
    assert not host.node.revoke_span(span)
    host.node.reclaim_freed()
    assert host.node.revoke_span(span)
    client.collect()
    assert client.allocate(500) == 0


def test_the_same_span_leased_again_to_the_same_client(host: ShmHost) -> None:
    client = host.client()
    span = host.give_span(client)
    client.give_back(client.allocate(60))
    host.store.revoke_spans(lambda: False)
    assert host.store.spans == {}
    assert host.give_span(client) == span
    first = client.allocate(3000)
    assert first == span + 64
    client.give_back(first)
    assert client.take_empty_spans() == [span]


def test_at_random_no_block_is_two_clients(host: ShmHost) -> None:
    dice = random.Random(7)
    clients = [host.client() for _ in range(3)]
    held: dict[int, tuple[int, int]] = {}  # payload -> client, bytes
    taken = 0
    for _ in range(4000):
        i = dice.randrange(len(clients))
        client = clients[i]
        size = dice.choice((60, 500, 4000))
        match dice.randrange(8):
            case 0 | 1 | 2:
                at = client.allocate(size)
                if at:
                    for other, (_, length) in held.items():
                        assert at + size <= other or other + length <= at
                    held[at] = (i, size)
                elif len(host.store.spans) < 5:
                    host.give_span(client)
            case 3 | 4 | 5 if held:
                at = dice.choice(list(held))
                clients[dice.choice((held.pop(at)[0], i))].give_back(at)
            case 6:
                before = len(host.store.spans)
                host.store.revoke_spans(lambda: dice.random() < 0.5)
                taken += before - len(host.store.spans)
            case 7:
                for span in client.take_empty_spans():
                    host.store.give_span(span, client.slot)
                if dice.random() < 0.1:
                    for at in held:
                        clients[i].give_back(at)
                    held.clear()
    assert taken > 20
