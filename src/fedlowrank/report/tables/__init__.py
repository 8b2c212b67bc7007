"""Tables of a report, as text, HTML, Markdown, LaTeX and CSV."""
