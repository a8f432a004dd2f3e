"""The report as a page: what a reader sees in a browser is what the JSON says."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import tvm_fusion
from tvm_fusion.demo import demo_module
from tvm_fusion.errors import InputError
from tvm_fusion.report.html import write
from tvm_fusion.report.html.write import page_text, write_html
from tvm_fusion.report.text import format_bytes, format_time

from ..support.tools import require, require_module
from .made_reports import AWKWARD, LAYER, layered_report

LAYERS = 75  # of eight kernels: 600
OPENS_WITHIN_S = 1.0
WIDTHS = {1280: 900, 390: 844}  # and heights, in pixels


@pytest.fixture(scope="module")
def window() -> Iterator[Any]:
    """A page of headless Chromium, one for all tests of a process."""
    program = require("chromium")
    playwright = require_module("playwright.sync_api")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser.new_page()
        browser.close()


@pytest.fixture(scope="module")
def reports() -> Mapping[str, Mapping[str, Any]]:
    explained = tvm_fusion.explain(demo_module("llvm"), target="llvm").to_json(sources=True)
    return {
        "10": json.loads(json.dumps(explained)),
        "600": layered_report(LAYERS),
        "600 apart": layered_report(LAYERS, repeated=False),
        "16": layered_report(2),
    }


@pytest.fixture(scope="module")
def files(reports, tmp_path_factory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {name: folder / f"{name}.html" for name in reports}
    for name, path in found.items():
        write_html(reports[name], path)
    return found


@pytest.fixture
def opened(window) -> Iterator[Callable[..., Any]]:
    """Opens a file; what it complains of in its console, and what it asks for, fails the test."""
    complaints = []
    listeners = {
        "console": lambda message: complaints.append(message.text),
        "pageerror": lambda error: complaints.append(str(error)),
        "request": lambda request: complaints.append(request.url),
    }
    for event, listener in listeners.items():
        window.on(event, listener)

    def open_page(path: Path, width: int = 1280) -> Any:
        window.set_viewport_size({"width": width, "height": WIDTHS[width]})
        window.goto(path.as_uri())
        window.locator("figure :is(svg, .empty)").last.wait_for(state="attached")
        complaints.remove(path.as_uri())
        return window

    yield open_page
    for event, listener in listeners.items():
        window.remove_listener(event, listener)
    assert complaints == []


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["10", "600", "600 apart"])
def test_a_page_is_there_within_a_second(opened, window, files, name):
    """In time of its thread, which a busy machine does not lengthen, file to figures."""
    session = window.context.new_cdp_session(window)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> dict[str, float]:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return {metric["name"]: metric["value"] for metric in metrics}

    before = spent()
    opened(files[name])
    used = {key: value - before[key] for key, value in spent().items()}
    session.detach()
    assert 0 < used["ScriptDuration"] <= used["TaskDuration"] < OPENS_WITHIN_S


@pytest.mark.one_in(4)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["10", "600"])
def test_a_page_fits_its_window_in_both_schemes(opened, files, tmp_path, name, width):
    page = opened(files[name], width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".bytes").count() > 0
    assert overlaps(page) == []
    backgrounds = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
        backgrounds.append(sum(drawn_on(tmp_path / f"{scheme}.png")))
    page.locator(".node.group").first.press("Enter")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=tmp_path / "panel.png")
    backgrounds.append(sum(drawn_on(tmp_path / "panel.png")))
    assert backgrounds[0] > 600 > 200 > max(backgrounds[1:])


OVERLAPS = """() => [...document.querySelectorAll("svg.graph")].flatMap((graph) => {
  const boxes = [...graph.querySelectorAll(".box, .bytes")].map((node) => {
    const { left, right, top, bottom } = node.getBoundingClientRect();
    return { left, right, top, bottom, said: node.parentNode.textContent };
  });
  return boxes.flatMap((a, k) => boxes.slice(k + 1).filter((b) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1
  ).map((b) => [a.said, b.said]));
})"""


def overlaps(page: Any) -> list[list[str]]:
    """Boxes and labels of the graph that lie upon each other."""
    return page.evaluate(OVERLAPS)


def drawn_on(path: Path) -> bytes:
    """The first pixel of a PNG, on which there is more: bytes differ from those beside them."""
    data, at, packed = path.read_bytes(), 8, b""
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += length + 12
    raw = zlib.decompress(packed)
    assert raw.count(0) < 0.99 * len(raw), f"{path} is blank"
    return raw[1:4]


def test_labels_that_overlap_are_found(opened, files):
    page = opened(files["16"])
    page.evaluate("document.querySelector('.bytes').setAttribute('y', 0)")
    page.evaluate("document.querySelectorAll('.bytes')[1].setAttribute('y', 0)")
    page.evaluate("document.querySelectorAll('.bytes').forEach((l) => l.setAttribute('x', 50))")
    assert overlaps(page)


# ---- What is shown is what the JSON says.

FIELDS = """(root) => Object.fromEntries([...root.querySelectorAll("[data-field]")]
  .filter((node) => !node.closest("ol, table, details") || node.matches("td *"))
  .map((node) => [node.dataset.field, node.textContent]))"""


def shown_fields(page: Any) -> dict[str, str]:
    return page.locator("#panel").evaluate(FIELDS)


def number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def expected_fields(report: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, str]:
    """What the panel of a group is to say, from the JSON only; what is None is not said."""
    times = ("predicted_us", "unfused_predicted_us")
    sizes = ("bytes_fused", "bytes_unfused", "spill_bytes", "code_bytes")
    forms = dict.fromkeys(times, format_time) | dict.fromkeys(sizes, format_bytes)
    forms |= dict.fromkeys(("launches", "registers"), "{:,}".format)
    forms |= dict.fromkeys(("label", "name", "kernel_class", "fallback"), str)
    forms |= {"error": number, "roofline_share": "{:.0%}".format, "flops": flops_text}
    said = {key: form(group[key]) for key, form in forms.items() if group.get(key) is not None}
    if config := report["sources"].get(group["name"], {}).get("config"):
        said["config"] = config
    for key in ("modules", "lines"):
        if any(group.get(key) or ()):
            said[key] = ", ".join(filter(None, group[key]))
    said |= {f"terms.{name}": format_time(us) for name, us in group["terms"].items()}
    if measured := group.get("measured"):
        keys = ("median_us", "low_us", "high_us")
        said |= {f"measured.{key}": format_time(measured[key]) for key in keys}
        said["measured.samples"] = f"{measured['samples']} samples"
    if group["assumed_l2"]:
        parts = (f"{name} {format_bytes(size)}" for name, size in group["assumed_l2"].items())
        said["assumed_l2"] = ", ".join(parts)
    return said | _expected_reasons(report, group)


def _expected_reasons(report: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, str]:
    said = {}
    if evidence := group["evidence"]:
        share = evidence["high" if evidence["kind"] == "model" else "ratio"]
        said = {"evidence.verdict": evidence["verdict"], "evidence.share": number(share)}
        said |= {f"evidence.{key}": number(evidence[key]) for key in ("low", "high")}
    if tuned := group["tuned"]:
        best, untuned = format_time(tuned["us"]), format_time(tuned["untuned_us"])
        said["tuned"] = f"{tuned['choice']}: {best}, untuned {untuned}"
    if group.get("same_as") is not None:
        same = report["groups"][group["same_as"]]
        if same is not group:
            said["same_as"] = title(same)
    if group.get("rejected") is not None:
        refusal = report["refusals"][group["rejected"]]
        numbers = (f"{key} = {number(value)}" for key, value in refusal["numbers"].items())
        texts = {key: refusal[key] for key in ("code", "why", "flip", "kernel_class")}
        texts |= {"where": ", ".join(refusal["where"]), "numbers": ", ".join(numbers)}
        if refusal["cost_us"]:
            texts["cost_us"] = format_time(refusal["cost_us"])
        said |= {f"refusal.{key}": text for key, text in texts.items() if text}
    return said


def title(group: Mapping[str, Any]) -> str:
    """The label, after the name of the result where the model has no name for the place."""
    return group["label"] if ": " in group["label"] else f"{group['ops'][-1]}: {group['label']}"


def flops_text(count: float) -> str:
    """As sizes are written, with another unit."""
    return format_bytes(count).replace("kB", "kFLOP").replace("B", "FLOP", 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["10", "600"])
def test_ten_groups_say_what_the_json_says(opened, files, reports, name):
    page, report = opened(files[name]), reports[name]
    boxes = page.locator(".node.group")
    indexes = [int(boxes.nth(k).get_attribute("data-group")) for k in range(boxes.count())]
    if name == "600":
        assert indexes == list(range(len(LAYER)))
        page.get_by_role("button", name=f"Show all {LAYERS}").click()
        indexes += [len(LAYER), len(LAYER) + 1]
    ops = {op["name"]: op for op in report["graph"]["ops"]}
    tensors = {tensor["id"]: tensor for tensor in report["graph"]["tensors"]}
    for index in indexes[:10]:
        group = report["groups"][index]
        page.locator(f'.node.group[data-group="{index}"]').click()
        assert page.locator("#panel h2").text_content() == title(group)
        assert shown_fields(page) == expected_fields(report, group)
        items = page.locator("#panel ol.ops li").all_inner_texts()
        for text, op in zip(items, group["ops"], strict=True):
            assert text.startswith(op)
            known = (ops[op][key] for key in ("operator", "module", "source"))
            assert all(word in text for word in known if word)
        for side in ("reads", "writes"):
            lines = page.locator(f'#panel table[data-field="{side}"] tr').all_inner_texts()
            for line, tensor in zip(lines, map(tensors.get, group[side]), strict=True):
                assert line.split("\t")[0] == tensor["name"]
                assert format_bytes(tensor["bytes"]) in line
        for field in ("kernel", "tensor_ir"):
            text = report["sources"][group["name"]][field]
            if text is None:
                continue
            page.locator(f'#panel details:has([data-field="{field}"]) summary').click()
            written = page.locator(f'#panel pre[data-field="{field}"]:not(:empty)')
            assert written.text_content() == text


def test_totals_and_times_are_those_of_the_json(opened, files, reports):
    page, report = opened(files["16"]), reports["16"]
    said = page.locator(".cards").evaluate(FIELDS)
    forms = {"launches": "{:,}".format, "bytes": format_bytes, "memory": format_bytes}
    for key, form in (forms | {"time_us": format_time}).items():
        fused, unfused = report[key]["fused"], report[key]["unfused"]
        assert said[f"total.{key}.fused"] == form(fused)
        assert said[f"total.{key}.unfused"] == form(unfused)
        assert said[f"total.{key}.ratio"] == f"{unfused / fused:.2f}x"
    assert said["total.verify.worst_error"] == number(report["verify"]["worst_error"])
    for name, time in report["times"].items():
        shown = page.locator(f'tr[data-peer="{name}"]').evaluate(FIELDS)
        if time["failure"]:
            assert shown == {"failure": time["failure"]}
            continue
        keys = ("median_us", "low_us", "high_us")
        expected = {key: format_time(time[key]) for key in keys} | {"samples": "40"}
        if time.get("verdict"):
            expected["verdict"] = time["verdict"]
        if time.get("ratio"):
            expected["ratio"] = f"{time['ratio']:.2f}x"
        assert shown == expected


def test_a_total_that_quartiles_do_not_tell_apart_is_no_gain(opened, reports, tmp_path):
    report = dict(reports["16"])
    even = report["times"]["torch.compile"]
    write_html(report | {"times": report["times"] | {"unfused": even}}, tmp_path / "even.html")
    said = opened(tmp_path / "even.html").locator(".cards").evaluate(FIELDS)
    assert said["total.time_us.ratio"] == even["verdict"]


def test_refusals_are_there_the_most_expensive_first(opened, files, reports):
    page, refusals = opened(files["16"]), reports["16"]["refusals"]
    while page.locator("#refused > button.more").is_visible():
        page.locator("#refused > button.more").click()
    cards = page.locator("#refused .refusal")
    ordered = sorted(refusals, key=lambda refusal: -(refusal["cost_us"] or -1))
    assert [card.evaluate(FIELDS)["refusal.why"] for card in cards.all()] == [
        refusal["why"] for refusal in ordered
    ]


def test_figures_have_a_point_for_each_kernel(opened, files, reports):
    page, groups = opened(files["16"]), reports["16"]["groups"]
    with_arithmetic = sum(group["flops"] > 0 for group in groups)
    counts = [figure.locator(".point").count() for figure in page.locator("figure").all()]
    assert counts[:2] == [with_arithmetic, len(groups)]
    page.locator("figure .point").last.dispatch_event("click")
    assert page.locator("#panel").is_visible()
    assert page.locator("figure .row").first.text_content().startswith("operators one by one")


def test_edges_carry_the_bytes_of_their_tensors(opened, files, reports):
    """Between kernels what one writes and the other reads; between operators all tensors, and apart
    those that stay inside a kernel.
    """
    page, report = opened(files["10"]), reports["10"]
    tensors = {tensor["id"]: tensor for tensor in report["graph"]["tensors"]}
    moved = []
    for first in report["groups"]:
        for second in report["groups"]:
            if first is not second and (both := {*first["writes"]} & {*second["reads"]}):
                moved.append(format_bytes(sum(tensors[t]["bytes"] for t in both)))
    page.get_by_text("After fusion", exact=True).first.click()
    labels = page.locator('.bytes[data-edge^="g"]:not([data-edge*="out"])')
    shown = labels.evaluate_all("(found) => found.map((label) => label.lastChild.textContent)")
    assert sorted(shown) == sorted(moved)
    page.get_by_text("Before fusion", exact=True).first.click()
    owner = {op: group["name"] for group in report["groups"] for op in group["ops"]}
    writer = {t: op["name"] for op in report["graph"]["ops"] for t in op["outputs"]}
    edges = [
        (owner.get(writer[t]), owner.get(op["name"]))
        for op in report["graph"]["ops"]
        for t in set(op["inputs"])
        if t in writer
    ]
    inside = sum(first == second is not None for first, second in edges)
    assert 0 < inside < len(edges)
    assert page.locator(".bytes.kept").count() == inside
    between = page.locator('.bytes:not(.kept)[data-edge^="o"]:not([data-edge*="out"])')
    assert between.count() == len(edges) - inside


# ---- Hands: the keyboard, and repeated layers.


def focused(page: Any) -> str:
    return page.evaluate("document.activeElement.dataset.key ?? document.activeElement.id")


def test_the_keyboard_reaches_groups_and_goes_along_edges(opened, files):
    page = opened(files["16"])
    page.get_by_text("After fusion", exact=True).first.click()
    page.locator("#view-after").focus()
    seen = []
    while focused(page) != "g1" and len(seen) < 20:
        page.keyboard.press("Tab")
        seen.append(focused(page))
    assert seen[-2:] == ["g0", "g1"]
    page.keyboard.press("ArrowDown")  # from the product to the attention that reads it
    assert focused(page) == "g2"
    page.keyboard.press("Enter")
    assert page.locator("#panel").is_visible()
    assert page.get_by_role("dialog").get_attribute("data-group") == "2"
    page.keyboard.press("Escape")
    assert page.locator("#panel").is_hidden()
    assert focused(page) == "g2"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    assert focused(page) == "g0"
    page.keyboard.press("ArrowRight")
    assert focused(page) == "g1"


def test_the_tab_key_goes_through_parts_that_were_not_on_the_screen(opened, files):
    page = opened(files["600 apart"], 390)
    drawn = page.locator(".node.group").count()
    assert drawn < 600
    page.locator(".node.group").last.focus()
    last = int(focused(page)[1:])
    while (
        focused(page) != f"g{last + 1}" and page.evaluate("document.activeElement.nodeName") == "g"
    ):
        page.keyboard.press("Tab")
    assert focused(page) == f"g{last + 1}"


def test_everything_that_can_be_clicked_has_a_role_and_a_name(opened, files):
    page = opened(files["16"])
    nodes = page.locator(".node[tabindex]")
    for node in nodes.all():
        assert node.get_attribute("role") in ("button", "link")
        assert node.get_attribute("aria-label")
    for button in page.locator("button:visible").all():
        assert button.get_attribute("aria-label") or button.text_content().strip()
    assert page.locator("h1").count() == 1


def test_repeated_layers_are_one_part_that_opens_and_closes(opened, files):
    page = opened(files["600"])
    assert page.locator(".part").count() == 1
    assert page.locator(".part .times").text_content() == f"x{LAYERS}"
    assert page.locator(".kernels tbody tr").count() == len(LAYER)
    page.get_by_role("button", name=f"Show all {LAYERS}").click()
    assert page.locator(".part").count() == LAYERS
    assert page.locator(".node.group").count() < 600  # the others when they come near the screen
    page.get_by_role("button", name=f"Collapse {LAYERS}").click()
    assert page.locator(".part").count() == 1


# ---- The file.


def test_made_reports_are_like_those_of_the_package(reports):
    real, made = reports["10"], reports["16"]
    assert made.keys() <= real.keys()
    for key in ("groups", "refusals"):
        assert made[key][0].keys() <= real[key][0].keys()
    assert made["device"].keys() == real["device"].keys()
    assert made["timeline"].keys() == real["timeline"].keys()
    for key in ("ops", "tensors"):
        assert made["graph"][key][0].keys() == real["graph"][key][0].keys()
    texts = [next(iter(report["sources"].values())) for report in (made, real)]
    assert texts[0].keys() == texts[1].keys()


def test_text_of_a_model_is_never_markup(opened, files, reports):
    text = files["16"].read_text(encoding="utf-8")
    assert AWKWARD not in text
    assert text.count("</script>") == 3
    page = opened(files["16"])
    labels = [group["label"] for group in reports["16"]["groups"] if AWKWARD in group["label"]]
    assert labels
    page.locator(f'.node.group[data-group="{len(LAYER) - 1}"]').click()
    assert shown_fields(page)["label"] == labels[0]


def test_what_a_report_lacks_is_left_out(opened, reports, tmp_path):
    needed = {key: reports["10"][key] for key in ("version", "target", "launches", "bytes")}
    optional = (
        "label",
        "lines",
        "same_as",
        "rejected",
        "modules",
        "reads",
        "writes",
        "flops",
        "measured",
        "terms",
        "evidence",
    )
    groups = [
        {key: value for key, value in group.items() if key not in optional}
        for group in reports["10"]["groups"]
    ]
    write_html(needed | {"groups": groups}, tmp_path / "old.html")
    page = opened(tmp_path / "old.html")
    assert page.locator(".node.group").count() == len(groups)
    page.locator(".node.group").first.click()
    assert shown_fields(page)["name"] == groups[0]["name"]
    write_html(needed | {"groups": []}, tmp_path / "empty.html")
    assert opened(tmp_path / "empty.html").locator("h1").is_visible()


def test_sizes_that_are_not_known_are_shapes_and_what_is_assumed_is_said(opened, reports, tmp_path):
    report = json.loads(json.dumps(reports["16"]))
    for tensor in report["graph"]["tensors"]:
        tensor |= {"bytes": None, "shape": ["n", 768]}
    for group in report["groups"]:
        group["flops"] = None
    report |= {"timeline": {"fused": None, "unfused": None}, "assumed": {"n": 512}}
    write_html(report, tmp_path / "symbolic.html")
    page = opened(tmp_path / "symbolic.html")
    assert "predicted for n = 512" in page.locator("header.top").inner_text()
    labels = page.locator(".bytes")
    shown = labels.evaluate_all("(found) => found.map((label) => label.lastChild.textContent)")
    assert set(shown) == {"n \N{MULTIPLICATION SIGN} 768 float16"}
    assert overlaps(page) == []
    assert page.locator("figure .empty").count() == 2


def test_the_answer_about_a_pair_is_shown(opened, reports, tmp_path):
    pair = {"names": ["q", "k"], "relation": "both read x", "price": "costs 3 us", "kernels": "two"}
    report = dict(reports["16"])
    write_html(
        report | {"pair": pair | {"refusals": report["refusals"][:2]}}, tmp_path / "why.html"
    )
    section = opened(tmp_path / "why.html").locator("#pair")
    assert section.locator("h2").inner_text() == "q and k"
    said = section.evaluate(FIELDS)
    assert {key: said[f"pair.{key}"] for key in ("relation", "price", "kernels")} == {
        key: pair[key] for key in ("relation", "price", "kernels")
    }
    assert section.locator(".refusal").count() == 2


def test_functions_are_chosen_from_a_list(opened, reports, tmp_path):
    functions = {"prefill": reports["16"], "decode": reports["10"], "loaded": "as text"}
    write_html({"version": 3, "functions": functions}, tmp_path / "several.html")
    page = opened(tmp_path / "several.html")
    assert page.locator(".node.group").count() == len(LAYER)
    page.get_by_label("Function").select_option("decode")
    assert page.locator(".node.group").count() == len(reports["10"]["groups"])
    page.get_by_label("Function").select_option("loaded")
    assert page.locator("main").inner_text() == "as text"


def test_the_scripts_can_be_inlined_and_load_nothing():
    for text in (path.read_text(encoding="utf-8") for path in write.HERE.rglob("*.js")):
        assert "</script" not in text
    page = page_text(layered_report(1))
    assert "default-src 'none'" in page
    assert "sourceMappingURL" not in page


def test_the_page_has_the_library_that_its_readme_names():
    readme = (write.HERE / "vendor" / "README.md").read_text(encoding="utf-8")
    version = readme.split("@dagrejs/dagre@")[1].split()[0]
    assert f'"{version}"' in (write.HERE / "vendor" / "dagre.min.js").read_text(encoding="utf-8")
    assert "Permission is hereby granted" in page_text(layered_report(1))


def test_what_is_no_report_is_refused(tmp_path):
    with pytest.raises(InputError, match="no report"):
        write_html({"plan": {}}, tmp_path / "page.html")
    with pytest.raises(InputError, match="cannot write"):
        write_html(layered_report(1), tmp_path / "nowhere" / "page.html")
