"""Random configurations of attention: a seed is a configuration, the same one for good.

config = configuration(7); mod = module_of(config); inputs_of(config, device); expected(config, ...)

The graph of a configuration is in `attention_random_graphs`, its numbers are in
`attention_random_numbers`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

SEEDS = range(40)
HEAD_SIZES = (64, 80, 96, 128, 256, 40, 72)
LAYOUTS = ("bhsd", "bshd", "merged", "packed", "turned")
OUTPUTS = ("bhsd", "bshd", "merged")
SPELLINGS = ("plain", "cast", "wide", "flash", "composite")
POSITIONS = ("all", "causal", "causal at the end", "window")
SMALL_HEADS, SMALL_LENGTH = 4, 90


@dataclass(frozen=True)
class Configuration:
    """One attention.

    Attributes
    ----------
    B, H, G, M, N, D, E : batch, query heads, key heads (H is a multiple), queries, keys, size of a
        head of queries and keys, and of values.
    dtype : of queries, keys, values and of most results.
    layout : of the inputs: [B, H, S, D], [B, S, H, D], [B, S, H * D], one tensor of all three as
        [B, S, (H + 2 G) * D], or [B, H, S, D] with the keys as [B, G, D, N].
    output : layout of the result.
    spelling : softmax in half precision; of half scores cast to float32; of float32 scores; of
        float32 scores with the division behind the second product; Relax's own operator.
    scale : factor of the "scores" or of the "query", or "divide" the scores.
    repeat : how key heads are spread over query heads: "repeat" or "expand".
    position : which keys a query sees by its place.
    window : number of keys of a window.
    added : shape of an additive mask, of letters BHMN and 1; "" for none.
    added_dtype : its dtype.
    boolean : the same of a mask of visible keys.
    guard : rows that see no key: "" where there are none, "result" where the result is replaced,
        "sums" where the maximum and the sum are.
    documents : a query sees keys of its document only.
    alibi, softcap : further functions of the logits.
    symbolic : which of B, M and N the graph does not know.
    lse : the logarithm of the sum of weights is another result.
    epilogue : what is done to the result: "", "residual", "gate" or "float32".
    """

    seed: int
    B: int
    H: int
    G: int
    M: int
    N: int
    D: int
    E: int
    dtype: str = "float16"
    layout: str = "bhsd"
    output: str = "bhsd"
    spelling: str = "plain"
    scale: str = "scores"
    repeat: str = "repeat"
    position: str = "all"
    window: int = 0
    added: str = ""
    added_dtype: str = "float16"
    boolean: str = ""
    guard: str = ""
    documents: bool = False
    alibi: bool = False
    softcap: bool = False
    symbolic: str = ""
    lse: bool = False
    epilogue: str = ""

    def __str__(self) -> str:
        parts = [
            f"{self.seed:2d} B{self.B} H{self.H}/{self.G} {self.M}x{self.N} D{self.D} E{self.E}",
            self.dtype,
            f"{self.layout}>{self.output}",
            f"{self.spelling}, {self.scale}",
            self.position if self.position != "window" else f"window {self.window}",
            self.added and f"+{self.added} {self.added_dtype}",
            self.boolean and f"?{self.boolean}",
            self.guard and f"guarded {self.guard}",
            *(n for n in ("documents", "alibi", "softcap", "lse") if getattr(self, n)),
            self.symbolic and f"symbolic {self.symbolic}",
            self.epilogue,
        ]
        return " ".join(part for part in parts if part)

    @property
    def itself(self) -> bool:
        """Queries and keys are of one sequence."""
        return self.layout == "packed"

    @property
    def wide(self) -> bool:
        """Logits are float32."""
        return self.spelling in ("cast", "wide", "flash")

    @property
    def apart(self) -> str | None:
        """What keeps the scores in memory, as the refusal says it; None where nothing does."""
        if self.N == 1 and "N" not in self.symbolic:
            return "one key"
        if self.layout == "turned" and ("N" in self.symbolic or self.N % 8):
            return "stored turned"
        return None

    def small(self) -> Configuration:
        """The same graph at sizes that an emulator can run."""
        ratio = self.H // self.G
        groups = max(1, min(self.G, SMALL_HEADS // ratio))
        m, n = (x if x <= SMALL_LENGTH else 48 + x % 40 for x in (self.M, self.N))
        if self.M <= self.N:
            m = min(m, n)
        if self.itself or self.M == self.N:
            m = n
        return replace(
            self, B=min(self.B, 2), H=ratio * groups, G=groups, M=m, N=n, window=min(self.window, 9)
        )


def configuration(seed: int) -> Configuration:
    """The configuration of a seed."""
    rng = random.Random(seed)
    layout = rng.choice(LAYOUTS)
    spelling = rng.choice(SPELLINGS)
    if spelling == "composite" and layout in ("turned", "merged"):
        layout = "bshd"
    heads = rng.choice((1, 2, 3, 4, 6, 8, 12, 16))
    groups = heads if rng.random() < 0.5 or spelling == "composite" else _divisor(rng, heads)
    n = _length(rng)
    if layout == "turned" and rng.random() < 0.7:
        n = -(-n // 8) * 8
    m = n if layout == "packed" or rng.random() < 0.3 else _length(rng)
    d = rng.choice(HEAD_SIZES)
    e = d if layout == "packed" or rng.random() < 0.7 else rng.choice(HEAD_SIZES)
    known = Configuration(
        seed,
        rng.randint(1, 4),
        heads,
        groups,
        m,
        n,
        d,
        e,
        rng.choice(("float16", "bfloat16")),
        layout,
        rng.choice(OUTPUTS),
        spelling,
        rng.choice(("scores", "query", "divide")),
        rng.choice(("repeat", "expand")),
    )
    return _finished(rng, _masked(rng, known))


def _masked(rng: random.Random, c: Configuration) -> Configuration:
    """With masks under which every row sees a key, or which guard those that do not."""
    position = rng.choice(POSITIONS)
    if c.M > c.N and position in ("causal at the end", "window"):
        position = "causal"
    if c.spelling == "composite":  # which has one mask: by place, or an added one
        position = rng.choice(POSITIONS[:3]) if c.M <= c.N else "causal"
        added = _shape(rng, "BHMN") if rng.random() < 0.4 else ""
        if added:
            position = "all"
        return replace(c, position=position, added=added, added_dtype=c.dtype)
    c = replace(c, position=position, window=rng.randint(1, 700) if position == "window" else 0)
    kind = rng.choice(("", "", "added", "boolean", "guarded", "documents"))
    if kind == "added":
        wide = c.wide and rng.random() < 0.5
        return replace(c, added=_shape(rng, "BHMN"), added_dtype="float32" if wide else c.dtype)
    if position == "window":
        return c
    if kind == "documents" and (position == "all" or c.M == c.N):
        return replace(c, documents=True)
    if kind == "boolean":
        return replace(c, boolean=rng.choice(("B11N", "B1MN", "11MN", "BHMN")))
    if kind == "guarded" and position == "all":
        sums = c.spelling == "flash"
        return replace(c, boolean="B1MN", guard="sums" if sums else "result")
    return c


def _finished(rng: random.Random, c: Configuration) -> Configuration:
    """With functions of the logits, symbols and what follows the attention."""
    if c.spelling != "composite":
        c = replace(c, softcap=rng.random() < 0.2, alibi=c.wide and rng.random() < 0.3)
    symbols = rng.choice(("", "", "", "N", "MN", "B", "BMN"))
    if c.layout == "turned" and rng.random() < 0.7:
        symbols = symbols.replace("N", "")
    if c.itself and symbols == "N":
        symbols = "MN"
    lse = c.spelling == "flash" and not c.guard and rng.random() < 0.6
    epilogue = rng.choice(("", "", "residual", "gate", "float32"))
    return replace(c, symbolic=symbols, lse=lse, epilogue=epilogue)


def _length(rng: random.Random) -> int:
    """One, odd, a multiple of 8, or of a tile."""
    kind = rng.randrange(9)
    if kind == 0:
        return 1
    if kind <= 2:
        return rng.randint(1, 150)
    if kind <= 4:
        return rng.randrange(151, 3000, 2)
    if kind == 5:
        return 128 * rng.randint(1, 23)
    return 8 * rng.randint(1, 375)


def _divisor(rng: random.Random, number: int) -> int:
    return rng.choice([d for d in range(1, number + 1) if number % d == 0])


def _shape(rng: random.Random, letters: Sequence[str]) -> str:
    """Some of the letters, 1 for the others; one along the keys."""
    return "".join(x if x == "N" or rng.random() < 0.6 else "1" for x in letters)


CONFIGURATIONS = tuple(configuration(seed) for seed in SEEDS)
