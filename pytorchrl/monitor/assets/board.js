// Every two seconds, the table is replaced by a new one from the server. The server has escaped all texts in the table,
// so it is safe to assign them to `innerHTML`. Sorting, filter and selected runs stay as they are, also if the reader
// opens a report and comes back.
(function () {
  const rows = document.getElementById("rows"), note = document.getElementById("note");
  const filter = document.getElementById("filter"), compare = document.getElementById("compare");
  const kept = JSON.parse(sessionStorage.getItem("board") || "{}");
  const chosen = new Set(kept.chosen || []);
  let sorted = kept.sorted || null, latest = null;
  filter.value = kept.filter || "";
  function keep() {
    sessionStorage.setItem("board", JSON.stringify({ chosen: [...chosen], sorted, filter: filter.value }));
  }
  function show() {
    const boxes = Array.from(rows.querySelectorAll("input[type=checkbox]"));
    const known = new Set(boxes.map((box) => box.value));
    if (latest !== null) for (const name of chosen) if (!known.has(name)) chosen.delete(name);
    for (const box of boxes) box.checked = chosen.has(box.value);
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size < 2 ? "compare: select runs" : `compare ${chosen.size} runs`;
    keep();
  }
  function count() {
    const table = rows.querySelector("table");
    if (!table) return;
    const shown = tables.filter(table, filter.value), all = table.tBodies[0].rows.length;
    document.getElementById("shown").textContent = shown < all ? `${shown} of ${all} runs` : `${all} runs`;
  }
  function refresh() {
    return fetch("/rows").then((answer) => (answer.ok ? answer.text() : Promise.reject())).then((text) => {
      note.textContent = "";
      if (text === latest) return;
      latest = text;
      rows.innerHTML = text;
      const table = rows.querySelector("table");
      if (table && sorted && table.tHead.rows[0].cells[sorted[0]]) tables.sort(table, sorted[0], sorted[1]);
      count();
      show();
    }).catch(() => { note.textContent = "the board has stopped"; });
  }
  rows.addEventListener("change", function (event) {
    if (event.target.value && event.target.checked) chosen.add(event.target.value);
    else chosen.delete(event.target.value);
    show();
  });
  filter.addEventListener("input", function () { count(); keep(); });
  document.addEventListener("sorted", function (event) { sorted = event.detail; keep(); });
  compare.addEventListener("click", function () {
    location.href = "/compare?" + [...chosen].map((name) => "run=" + encodeURIComponent(name)).join("&");
  });
  document.getElementById("none").addEventListener("click", function () { chosen.clear(); show(); });
  document.getElementById("all").addEventListener("click", function () {
    for (const row of rows.querySelectorAll("tbody tr:not([hidden]) input")) chosen.add(row.value);
    show();
  });
  (function again() { (document.hidden && latest !== null ? Promise.resolve() : refresh()).then(() => setTimeout(again, 2000)); })();
})();
