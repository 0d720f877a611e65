from types import SimpleNamespace

from pytorchrl.agent.multi.data import MultiBatch, joined, own_names


def test_policy_names_are_added_and_removed_as_prefixes():
    values = {"a": {"x": 1}, "a b": {"x": 2, "y/z": 3}}
    assert joined(values) == {"a/x": 1, "a b/x": 2, "a b/y/z": 3}
    assert {policy: own_names(joined(values), policy) for policy in values} == values


def test_multi_policy_batch_has_the_samples_of_all_policies_in_order():
    batch = MultiBatch({"b": SimpleNamespace(num_samples=3)}, ("a", "b"), num_samples=2)
    assert list(batch.samples.items()) == [("a", 0), ("b", 3)]
    assert MultiBatch({}, ("a",)).samples == {"a": 0}
