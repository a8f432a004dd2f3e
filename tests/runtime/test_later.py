"""Attributes that are made when they are read."""

from tvm_fusion.runtime.calls.later import Later


class Holder:
    found = Later()


def test_it_is_made_once_when_it_is_read():
    holder, made = Holder(), []
    holder.found = lambda own: made.append(own) or len(made)
    assert made == []
    assert (holder.found, holder.found) == (1, 1)
    assert made == [holder]


def test_other_values_are_kept_as_they_are():
    holder = Holder()
    holder.found = "text"
    assert holder.found == "text"
    holder.found = None
    assert holder.found is None
