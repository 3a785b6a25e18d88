"""The HTML report as a person meets it: in headless Chromium, on a phone and on a desk, light and dark."""

from __future__ import annotations

import pytest

from hal_attn.testing import FEATURES, html, matrix, verdict
from hal_attn.testing.merge import Merged
from hal_attn.testing.verdict import Demand
from tests.testing import reports
from tests.testing.browser import chromium

pytestmark = pytest.mark.browser

PHONE, DESK = (390, 844), (1440, 900)
PAGES = {
    "alone": Merged.of(reports.mixed()),
    "good": Merged.of(reports.good()),
    "merged": Merged((("h200", reports.good()), ("edge", reports.mixed()))),
    "empty": Merged.of(reports.report(reports.away("cuda"), reports.missing("flash_attn_3", "cuda"))),
}
VIEWS = [(size, scheme) for size in (PHONE, DESK) for scheme in ("light", "dark")]

# Every element with text of its own: what is said, how large, and the contrast with what lies behind it (WCAG 2).
TEXTS = """() => {
  const channels = text => {
    const found = text.match(/[0-9.]+/g).map(Number);
    return found.length === 3 ? [...found, 1] : found;
  };
  const light = ([red, green, blue]) => {
    const linear = [red, green, blue].map(c => c / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const found = channels(getComputedStyle(at).backgroundColor);
      if (found[3] > 0) return found;
    }
    return [255, 255, 255, 1];
  };
  return [...document.querySelectorAll("main *")]
    .filter(e => [...e.childNodes].some(n => n.nodeType === Node.TEXT_NODE && n.data.trim()))
    .filter(e => e.checkVisibility())
    .map(e => {
      const style = getComputedStyle(e);
      const [high, low] = [light(channels(style.color)), light(behind(e))].sort((a, b) => b - a);
      const contrast = (high + 0.05) / (low + 0.05);
      return {text: e.textContent.trim().slice(0, 60), size: parseFloat(style.fontSize), contrast};
    });
}"""
# Elements outside the boxes that may scroll, whose right edge is beyond the window.
BEYOND = """() => [...document.querySelectorAll("main *")]
  .filter(e => e.checkVisibility() && !e.closest(".scroll table"))
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
  .map(e => e.outerHTML.slice(0, 120))"""
CELLS = """() => [...document.querySelectorAll("table.matrix td")].map(e => ({
  machine: e.dataset.machine, platform: e.dataset.platform, backend: e.dataset.backend, feature: e.dataset.feature,
  status: e.dataset.status, text: e.innerText.trim().split(/\\n+/), sign: e.querySelector("use").getAttribute("href"),
  colour: getComputedStyle(e).backgroundColor, striped: getComputedStyle(e).backgroundImage !== "none",
}))"""
HEAT = """() => [...document.querySelectorAll("table.errors tbody tr")].map(row =>
  [...row.querySelectorAll("td")].map(e => [e.innerText.trim(), getComputedStyle(e).backgroundColor]))"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def visit(browser, tmp_path):
    """Opens the page of a merged report; what it asked for and complained about stands in `.asked` and `.said`."""
    contexts = []

    def visit(merged, size=DESK, scheme="light", problems=()):
        file = tmp_path / "report.html"
        file.write_text(html.render(merged, problems), encoding="utf-8")
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        contexts.append(context)
        context.set_default_timeout(30_000)
        page = context.new_page()
        page.asked, page.said = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.goto(file.as_uri())
        page.address = file.as_uri()
        return page

    yield visit
    for context in contexts:
        context.close()


@pytest.mark.parametrize(("size", "scheme"), VIEWS, ids=str)
@pytest.mark.parametrize("name", PAGES)
def test_it_reads_well_at_phone_and_desk_width_light_and_dark(visit, name, size, scheme):
    merged = PAGES[name]
    page = visit(merged, size, scheme, verdict.problems(merged, Demand(hardware=True)))
    assert page.asked == [page.address], "it must need nothing but itself"
    assert page.said == []
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == size[0]
    assert page.evaluate(BEYOND) == []
    texts = page.evaluate(TEXTS)
    assert len(texts) > 10
    assert [found for found in texts if found["size"] < 12] == []
    assert [found for found in texts if found["contrast"] < 4.5] == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 21, 27)"
    assert dark == (scheme == "dark")


@pytest.mark.parametrize("size", [PHONE, DESK], ids=str)
def test_whatever_is_tapped_is_large_enough(visit, size):
    page = visit(PAGES["alone"], size)
    sizes = {
        selector: [box.bounding_box()["height"] for box in page.locator(selector).all()]
        for selector in ("a.cell", "summary")
    }
    assert all(heights and min(heights) >= 44 for heights in sizes.values()), sizes


@pytest.mark.parametrize("name", ["alone", "merged"])
def test_every_cell_of_the_matrix_is_there_with_sign_word_colour_and_count(visit, name):
    merged = PAGES[name]
    right = {
        (column.machine, column.platform, column.backend, feature): (column, cell)
        for column in merged.columns
        for feature, cell in zip(FEATURES, column.cells(FEATURES), strict=True)
    }
    cells = visit(merged).evaluate(CELLS)
    assert len(cells) == len(right) == len(FEATURES) * len(merged.columns)
    colours = {}
    for found in cells:
        column, cell = right[found["machine"], found["platform"], found["backend"], found["feature"]]
        assert found["status"] == found["text"][0] == cell.status
        assert found["sign"] == "#sign-" + cell.status.replace(" ", "-")
        assert found["striped"] == column.simulated
        note = found["text"][1]
        assert note.endswith("simulated") == column.simulated
        whole, alike = len(cell.checks), cell.counts[cell.status]
        assert note.startswith(verdict.checks(whole) if whole == alike else f"{alike} of {whole}")
        colours.setdefault(found["status"], set()).add(found["colour"])
    assert set(colours) == {"passed", "failed", "refused", "not run"}
    assert len(set.union(*colours.values())) == 4, "one colour a status, and none twice"


def test_a_feature_that_was_not_looked_at_is_not_run(visit):
    only = reports.backend("only")
    bare = reports.BackendReport(
        name="only", platform="cpu", simulated=False, available=True, checks=tuple(only.checks[:1])
    )
    cells = visit(Merged.of(reports.report(reports.here(), bare))).evaluate(CELLS)
    assert [found["status"] for found in cells] == ["passed"] + ["not run"] * (len(FEATURES) - 1)


def test_the_heat_map_darkens_with_the_error_and_marks_what_failed(visit):
    shares = (0.0, 0.004, 0.05, 0.2, 0.4, 0.6, 0.95)
    measured = [
        reports.check("b", feature, error=share, allowed=1.0) for feature, share in zip(FEATURES, shares, strict=False)
    ]
    over = reports.check("b", "LSE", "failed", message="wrong", error=3.0, allowed=1.0)
    blind = reports.check("b", "gradient", "failed", message="not a number")
    none = reports.check("b", "window", "refused")
    merged = Merged.of(reports.report(reports.here(), reports.backend("b", *measured, over, blind, none)))
    rows = dict(zip(FEATURES, (row[0] for row in visit(merged).evaluate(HEAT)), strict=True))
    assert [rows[feature][0] for feature in FEATURES[:7]] == ["0 %", "< 1 %", "5 %", "20 %", "40 %", "60 %", "95 %"]
    assert len({rows[feature][1] for feature in FEATURES[1:7]}) == 6
    assert rows["LSE"][0] == "300 %"
    assert rows["gradient"][0] == "failed"
    assert rows["window"][0] == "-"
    assert rows["LSE"][1] == rows["gradient"][1] not in {rows[feature][1] for feature in FEATURES[:7]}
    assert matrix.worst(measured) == 0.95


def test_a_cell_leads_to_its_reason_by_pointer_and_by_keyboard(visit):
    page = visit(PAGES["alone"], PHONE)
    reason = page.get_by_text("no markup").first
    assert not reason.is_visible()
    page.locator('td[data-backend="shaky"][data-feature="window"] a').click()
    assert reason.is_visible()
    assert page.get_by_text("and 4 more for the same reason").is_visible()
    other = page.locator('article[data-reasons="cpu/steady"] summary').first
    other.press("Enter")
    assert page.get_by_text("causal: have given, need off").is_visible()


def test_a_failure_is_open_with_its_rule_and_its_numbers(visit):
    text = visit(PAGES["alone"]).locator('article[data-reasons="cpu/shaky"]').inner_text()
    for part in ("the LSE is in base 2", "rule “LSE”", "error 0.443, allowed 1e-06", "packed 2 sequences"):
        assert part in text


def test_nothing_in_a_report_becomes_markup(visit):
    page = visit(PAGES["alone"], problems=[reports.HOSTILE])
    assert page.locator("script, article b:text-is('bold'), .remarks b").count() == 0
    assert reports.HOSTILE in page.locator(".remarks").first.inner_text()
    assert "MI300X <gfx942>" in page.locator("dl").inner_text()


def test_only_the_box_of_the_matrix_scrolls_and_the_features_stay_in_sight(visit):
    page = visit(PAGES["merged"], PHONE)
    box = page.locator(".scroll").first
    first = box.locator("tbody th.first").first
    before = first.bounding_box()["x"]
    assert box.evaluate("e => { e.scrollLeft = 300; return e.scrollLeft; }") > 0
    assert first.bounding_box()["x"] == pytest.approx(before, abs=1)
    assert page.evaluate("window.scrollX") == 0


def test_what_was_simulated_or_did_not_run_is_said_in_words(visit):
    page = visit(PAGES["alone"])
    head = page.locator("header").first.inner_text()
    assert "1 check fails; checked: 4 backends, 2 of them SIMULATED" in head
    assert "rocm was SIMULATED: stand-ins for the vendor's kernels ran on the CPU" in head
    assert page.locator("thead .tag").all_inner_texts() == ["SIMULATED"] * 2
    away = page.locator("section:has(#not-here)").inner_text()
    assert "cuda did not run: no device of cuda is here; plug one in" in away
    assert "absent_kernels of cpu did not run: the library flashy is not installed" in away


def test_a_merged_page_names_machines_and_where_they_disagree(visit):
    page = visit(PAGES["merged"])
    assert page.locator("[data-machine] h3").all_inner_texts() == ["h200", "edge"]
    headings = [text.replace("\n", " ") for text in page.locator("table.matrix th.group").all_inner_texts()]
    assert headings == ["cpu on h200", "cpu on edge", "rocm on edge SIMULATED"]
    conflict = page.locator('[data-conflict="cpu/steady/window"]')
    conflict.locator("summary").click()
    assert [" ".join(text.split()) for text in conflict.locator("li").all_inner_texts()] == [
        "refused h200",
        "passed edge",
    ]


def test_no_failure_is_not_shown_in_the_colour_of_one(visit):
    colour = "e => getComputedStyle(e).backgroundColor"
    total = "[data-total=failed]"
    good, bad = (visit(PAGES[name]).locator(total) for name in ("good", "alone"))
    assert (good.inner_text().strip(), bad.inner_text().strip()) == ("0 failed", "1 failed")
    assert good.evaluate(colour) != bad.evaluate(colour)


def test_a_page_of_nothing_says_so(visit):
    text = visit(PAGES["empty"]).locator("main").inner_text()
    assert "Nothing was shown: no check passed" in text
    assert "No backend ran" in text
