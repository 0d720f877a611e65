// Tables with the class "sorted" are sorted by a click on a column's name. Cells state their value in `data-v`; rows
// without a value come last. An input with `data-filter` shows only those rows that contain all of its words.
const tables = {
  sort(table, column, down) {
    const body = table.tBodies[0];
    const value = (row) => {
      const cell = row.cells[column], text = cell.dataset.v ?? cell.textContent.trim();
      return text === "" || text === "-" ? null : table.tHead.rows[0].cells[column].dataset.n ? Number(text) : text;
    };
    const keyed = Array.from(body.rows, (row) => [value(row), row]);
    keyed.sort(([one], [other]) => {
      if (one === null || other === null) return (one === null) - (other === null);
      const order = typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true });
      return down ? -order : order;
    });
    body.append(...keyed.map(([, row]) => row));
    for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
    table.tHead.rows[0].cells[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  },
  filter(table, text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      const content = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => content.includes(word));
      shown += !row.hidden;
    }
    return shown;
  },
};
document.addEventListener("click", function (event) {
  const cell = event.target.closest("table.sorted thead th");
  if (!cell || !cell.querySelector("button")) return;
  const down = cell.getAttribute("aria-sort") ? cell.getAttribute("aria-sort") === "ascending" : !!cell.dataset.n;
  tables.sort(cell.closest("table"), cell.cellIndex, down);
  document.dispatchEvent(new CustomEvent("sorted", { detail: [cell.cellIndex, down] }));
});
document.addEventListener("input", function (event) {
  if (!event.target.matches("input[data-filter]")) return;
  const table = document.querySelector(event.target.dataset.filter + " table");
  if (table) tables.filter(table, event.target.value);
});
