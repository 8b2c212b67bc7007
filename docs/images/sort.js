// Tables within `.sortable` are sorted by the column whose heading is clicked: accuracies with the largest first, ranks, costs and text
// with the least. A second click turns the order; cells without a number stay last.
document.addEventListener("DOMContentLoaded", () => {
  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b));
  for (const table of document.querySelectorAll(".sortable table")) {
    const body = table.tBodies[0];
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      const textOf = (row) => row.cells[column].textContent.trim().replace("−", "-");
      const isNumeric = [...body.rows].some((row) => !Number.isNaN(parseFloat(textOf(row))));
      const value = (row) => (isNumeric ? parseFloat(textOf(row)) : textOf(row));
      const first = /accuracy|worst/.test(heading.textContent) ? "descending" : "ascending";
      heading.tabIndex = 0;
      heading.title = "sort by this column";
      if (column === 0) heading.ariaSort = "ascending"; // the page is written by rank
      const sort = () => {
        const turned = first === "descending" ? "ascending" : "descending";
        const order = heading.ariaSort === first ? turned : first;
        const sign = order === "ascending" ? 1 : -1;
        const rows = [...body.rows].filter((row) => !Number.isNaN(value(row)));
        const rest = [...body.rows].filter((row) => Number.isNaN(value(row)));
        body.append(...rows.sort((a, b) => sign * compare(value(a), value(b))), ...rest);
        headings.forEach((other) => (other.ariaSort = "none"));
        heading.ariaSort = order;
      };
      heading.addEventListener("click", sort);
      heading.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    });
  }
});
