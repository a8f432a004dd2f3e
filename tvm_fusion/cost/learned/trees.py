"""Boosted regression trees without the library that trained them: a few array operations a query.

Every tree is stored as a full binary tree of the same depth, level by level: node `i` has the
children `2 i + 1` (its feature is below the threshold) and `2 i + 2`; a leaf that ends early is
repeated under nodes whose threshold is infinite. Comparisons and sums are in float32 and in the
order in which xgboost does them, so that both give the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...errors import InputError


@dataclass(frozen=True)
class Trees:
    """Trees of equal depth.

    Attributes
    ----------
    feature : (trees, 2**depth - 1) int32
    threshold : (trees, 2**depth - 1) float32
    leaf : (trees, 2**depth) float32
    base : what all trees are added to
    """

    feature: np.ndarray
    threshold: np.ndarray
    leaf: np.ndarray
    base: float = 0.0

    @property
    def depth(self) -> int:
        return self.leaf.shape[1].bit_length() - 1

    def predict(self, row: np.ndarray) -> float:
        """The value at one row of features, float32."""
        values = row[: len(self._counts)].repeat(self._counts)
        taken = self._left + (values >= self._thresholds)
        node = self._roots
        for _ in range(self.depth):
            node = self._children.take(taken.take(node))
        return float(np.add.accumulate(self._leaves.take(node))[-1]) + self.base

    def predict_many(self, rows: np.ndarray) -> np.ndarray:
        """The values at (n, features) rows."""
        rows = np.asarray(rows, np.float32)
        total = np.zeros(len(rows), np.float32)
        lines = np.arange(len(rows))
        for feature, threshold, leaf in zip(self.feature, self.threshold, self.leaf, strict=True):
            node = np.zeros(len(rows), np.int64)
            for _ in range(self.depth):
                node = 2 * node + 1 + (rows[lines, feature[node]] >= threshold[node])
            total += leaf[node - feature.size]
        return total.astype(np.float64) + self.base

    def to_json(self) -> dict[str, Any]:
        """Plain lists; numbers are written as the shortest text that gives the same float32."""
        return {
            "depth": self.depth,
            "base": self.base,
            "feature": self.feature.tolist(),
            "threshold": [[_short(x) for x in line] for line in self.threshold],
            "leaf": [[_short(x) for x in line] for line in self.leaf],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Trees:
        """Reads `to_json` back.

        Raises
        ------
        InputError
            The lists do not have the sizes of full trees of one depth.
        """
        try:
            nodes = 2 ** int(data["depth"]) - 1
            count = len(data["leaf"])
            feature = np.array(data["feature"], np.int32).reshape(count, nodes)
            threshold = np.array(
                [[np.inf if x is None else x for x in line] for line in data["threshold"]],
                np.float32,
            ).reshape(count, nodes)
            leaf = np.array(data["leaf"], np.float32).reshape(count, nodes + 1)
            return Trees(feature, threshold, leaf, float(data["base"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"broken trees: {error}; make them again with `calibrate --refit`"
            ) from error

    # ---- tables over the inner nodes of all trees, those that look at the same feature side by
    # side (to repeat numbers is quicker than to gather them), and over all leaves
    @cached_property
    def _order(self) -> np.ndarray:
        """The inner nodes by feature."""
        return np.argsort(self.feature.reshape(-1), kind="stable")

    @cached_property
    def _counts(self) -> np.ndarray:
        """Inner nodes of each feature."""
        return np.bincount(self.feature.reshape(-1))

    @cached_property
    def _thresholds(self) -> np.ndarray:
        return self.threshold.reshape(-1)[self._order]

    @cached_property
    def _leaves(self) -> np.ndarray:
        return self.leaf.reshape(-1)

    @cached_property
    def _places(self) -> np.ndarray:
        """Where each inner node stands."""
        places = np.empty_like(self._order)
        places[self._order] = np.arange(len(places))
        return places

    @cached_property
    def _roots(self) -> np.ndarray:
        trees, nodes = self.feature.shape
        return self._places[np.arange(trees) * nodes] if nodes else np.arange(trees)

    @cached_property
    def _left(self) -> np.ndarray:
        """Where the left child of each inner node stands among all children; the right one is next
        to it.
        """
        return 2 * np.arange(len(self._order))

    @cached_property
    def _children(self) -> np.ndarray:
        """Both children of each inner node: inner nodes, or, of those in the last level, leaves."""
        trees, nodes = self.feature.shape
        tree, child = np.arange(trees)[:, None], np.arange(1, 2 * nodes + 1)
        inner = child < nodes
        place = self._places[tree * nodes + np.where(inner, child, 0)]
        found = np.where(inner, place, tree * (nodes + 1) + child - nodes)
        return found.reshape(-1, 2)[self._order].reshape(-1)


def from_booster(booster: Any, base: float = 0.0) -> Trees:
    """The trees of a trained `xgboost.Booster`; its own base score has to be 0."""
    model = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]
    trees = model["trees"]
    depth = max((_depth(tree, 0) for tree in trees), default=0)
    nodes = 2**depth - 1
    feature = np.zeros((len(trees), nodes), np.int32)
    threshold = np.full((len(trees), nodes), np.inf, np.float32)
    leaf = np.zeros((len(trees), nodes + 1), np.float32)
    for k, tree in enumerate(trees):
        _fill(tree, 0, 0, feature[k], threshold[k], leaf[k])
    return Trees(feature, threshold, leaf, base)


def _depth(tree: Mapping[str, Any], node: int) -> int:
    if tree["left_children"][node] < 0:
        return 0
    return 1 + max(_depth(tree, tree[side][node]) for side in ("left_children", "right_children"))


def _fill(tree: Mapping[str, Any], source: int, node: int, feature, threshold, leaf) -> None:
    """Copies the subtree below `source` to the place `node` of a full tree."""
    left, right = tree["left_children"][source], tree["right_children"][source]
    if node >= len(feature):
        leaf[node - len(feature)] = tree["split_conditions"][source]
        return
    if left < 0:
        left = right = source
    else:
        feature[node] = tree["split_indices"][source]
        threshold[node] = tree["split_conditions"][source]
    _fill(tree, left, 2 * node + 1, feature, threshold, leaf)
    _fill(tree, right, 2 * node + 2, feature, threshold, leaf)


def _short(value: np.float32) -> float | None:
    """The number with the fewest digits that rounds to the same float32; None for infinity."""
    return None if np.isinf(value) else float(np.format_float_scientific(value, unique=True))
