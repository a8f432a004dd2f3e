"""The benchmark of torch's operators and our calls in turns."""

import json

import pytest
import torch

from tvm_fusion.host.threads import thread_count

from . import neighbours


def test_a_result_holds_each_way_of_both(tmp_path, capsys):
    file = tmp_path / "neighbours.json"
    options = ["--rounds", "1", "--calls", "3", "--only", "chain 256"]
    assert neighbours.main([*options, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert (result["threads"], result["torch_threads"]) == (thread_count(), torch.get_num_threads())
    (row,) = result["rows"]
    assert row["name"] == "chain 256x256"
    for who in ("torch", "ours"):
        assert set(row[who]) == {*neighbours.WAYS, "loss"}
        for way in neighbours.WAYS:
            found = row[who][way]
            assert 0 < found["low_us"] <= found["us"] <= found["high_us"]
    assert "in turns" in capsys.readouterr().out


def test_what_is_lost_is_told_by_the_median_and_by_the_mean_within_a_round():
    alone = neighbours.summary([10.0, 10.0, 10.0, 10.0])
    in_turn = neighbours.summary([11.0, 11.0, 11.0, 47.0])
    slow = neighbours.summary([90.0, 90.0, 90.0, 90.0])
    rounds = [
        {"alone": first, "in turns": second}
        for first, second in ((alone, in_turn), (slow, slow), (alone, in_turn))
    ]
    assert neighbours.loss(rounds, "alone") == {"us": 1.1, "mean_us": 2.0}


@pytest.mark.parametrize("calls", [1, 5])
def test_calls_take_turns_and_the_first_ones_do_not_count(monkeypatch, calls):
    monkeypatch.setattr(neighbours, "PAUSE_S", 0.0)
    order, samples = [], {}
    turns = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    neighbours.sample(samples, turns, calls)
    assert order == ["a", "b"] * (neighbours.WARM_CALLS + calls)
    assert {name: len(values) for name, values in samples.items()} == {"a": calls, "b": calls}
