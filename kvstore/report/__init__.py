"""A store as one page to look at: `collect` reads the numbers of an open store, `render` makes the HTML.

`kvstore report` calls both. The plots are drawn by plotly.js, which the extra `kvstore-lm[report]` brings.
"""

from kvstore.report.data import ReportData, collect
from kvstore.report.page import render

__all__ = ["ReportData", "collect", "render"]
