// The list of tests: filtered by text, verdict and failure, and sorted.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const charts = aortaCharts(data);
  const list = document.getElementById("tests");
  const entries = all("details.test-entry").map((entry) => ({
    entry,
    name: entry.dataset.name.toLowerCase(),
    failed: entry.dataset.failed === "yes",
    place: Number(entry.dataset.place),
    rows: all("tr[data-outcome]", entry).map((row) => ({
      row, outcome: row.dataset.outcome, text: row.cells[0].textContent.toLowerCase(),
    })),
  }));
  const total = entries.reduce((sum, { rows }) => sum + rows.length, 0);
  const text = document.getElementById("filter");
  const onlyFailed = document.getElementById("only-failed");
  const sort = document.getElementById("sort");
  const boxes = all("input.outcome");

  // A test without verdicts, for example one that failed before a launch, is found by its name.
  function filter() {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    let tests = 0, verdicts = 0;
    for (const { entry, name, failed, rows } of entries) {
      let left = 0;
      for (const { row, outcome, text: metric } of rows) {
        row.hidden = !(wanted.has(outcome) && words.every((word) => name.includes(word) || metric.includes(word)));
        left += !row.hidden;
      }
      all("table.verdicts", entry).forEach((table) => {
        table.hidden = all("tbody tr", table).every((row) => row.hidden);
        const folded = table.closest("details.skipped");
        if (folded) folded.hidden = table.hidden;
      });
      const found = rows.length ? left > 0 : words.every((word) => name.includes(word));
      entry.hidden = !found || (onlyFailed.checked && !failed);
      tests += !entry.hidden;
      verdicts += entry.hidden ? 0 : left;
    }
    document.getElementById("count").textContent =
      `${tests} of ${entries.length} tests, ${verdicts} of ${total} verdicts`;
  }

  // The page lists the tests with the worst verdict first.
  const orders = {
    worst: () => 0,
    place: (a, b) => a.place - b.place,
    name: (a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : 0),
  };
  function order() {
    list.append(...[...entries].sort(orders[sort.value]).map(({ entry }) => entry));
    charts.drawVisible();
  }

  function openAll(open) {
    entries.forEach(({ entry }) => { entry.open = open && !entry.hidden; });
  }

  entries.forEach(({ entry }) => entry.addEventListener("toggle", charts.drawVisible));
  document.getElementById("open-all").addEventListener("click", () => openAll(true));
  document.getElementById("close-all").addEventListener("click", () => openAll(false));
  if (entries.length) {
    text.addEventListener("input", filter);
    onlyFailed.addEventListener("change", filter);
    boxes.forEach((box) => box.addEventListener("change", filter));
    sort.addEventListener("change", order);
    filter();
  }
  aortaTheme.follow(charts.redraw);
})();
