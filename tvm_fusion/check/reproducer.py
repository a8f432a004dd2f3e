"""What a user gets instead of a module with wrong numbers: an error that says what is wrong and
where, and a folder that shows it again.

    $TVM_FUSION_CACHE/wrong/<hash>/module.json      the model, as TVM keeps it
                                   reproduce.py     compiles it and prints the report
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path

import tvm

from .._version import __version__
from ..errors import InputError, Unsupported, VerificationError
from ..flow.planned import Planned
from ..host.atomic_files import replace_file
from ..plan.plan import PlannedGroup
from ..runtime.build.cubin_cache import cache_dir
from ..transform.apply.materialize import materialize
from ..tuning.session.choices import ranked_configs, text_of
from .compiled import Checked

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 30  # of weights; more are not written to anybody's disk

SCRIPT = '''\
"""Wrong numbers with tvm_fusion {version}, TVM {tvm}: {why}"""

from pathlib import Path

import tvm

import tvm_fusion

folder = Path(__file__).parent
module = tvm.ir.load_json((folder / "module.json").read_text())
target = tvm.target.Target({target})
policy = {policy}
compiled = tvm_fusion.compile(module, target, policy=policy, verify="report")
print(compiled.report.full())
'''


def wrong_numbers(checked: Checked) -> VerificationError:
    """The error for a function that no fallback makes right, with a reproducer where one can be
    written.

    Names the outputs, the worst elements, each group that is wrong by itself with its kernel and
    configuration, and what was tried.
    """
    planned = checked.made.planned
    name = planned.source.function
    where = "" if name == "main" else f"function {name}: "
    lines = [f"{where}wrong numbers, whatever is compiled: {checked.verification.why}"]
    for name, (group, why) in checked.wrong.items():
        ops, how = "+".join(group.ops), configuration(planned, group)
        lines.append(f"  {ops} is wrong by itself (kernel {name}, class {how}): {why}")
    if not checked.wrong:
        lines.append("  no group of the plan is wrong by itself")
    lines.append("  tried: " + "; ".join(checked.tried))
    folder = write_reproducer(planned, checked.verification.why)
    if folder is not None:
        lines.append(f"  to see it again, and to report it: python {folder / 'reproduce.py'}")
    lines.append('  verify="report" returns the module all the same')
    return VerificationError("\n".join(lines))


def configuration(planned: Planned, group: PlannedGroup) -> str:
    """The class of a group and the configuration that its kernel is written in."""
    name = group.kernel_class
    try:
        made = materialize(planned.low, planned.graph, planned.plan)
        func = made.mod[made.functions[group.ops]]
        ranked = ranked_configs(func, name, planned.hw, planned.policy)
    except (KeyError, Unsupported):  # cut meanwhile: its function is gone
        return name
    return f"{name}, {text_of(ranked[0][1])}" if ranked and ranked[0][1] is not None else name


def write_reproducer(planned: Planned, why: str) -> Path | None:
    """Write the folder; None, with a warning, where that is not possible."""
    text = tvm.ir.save_json(planned.mod)
    if len(text) > MOST_BYTES:
        logger.warning("no reproducer: the model has %.1f GB", len(text) / 1e9)
        return None
    folder = cache_dir() / "wrong" / hashlib.sha256(text.encode()).hexdigest()[:16]
    script = SCRIPT.format(
        version=__version__,
        tvm=tvm.__version__,
        why=why.replace("\\", "/").replace('"', "'"),
        target=json.loads(str(planned.target)),
        policy=repr(asdict(planned.policy)),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "module.json", text)
        replace_file(folder / "reproduce.py", script)
    except (OSError, InputError) as error:
        logger.warning("no reproducer: %s", error)
        return None
    return folder
