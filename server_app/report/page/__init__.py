"""The report page as a Jinja template, in parts. They are Python files because Flower's app bundle has no other text files."""

from common.pages.style import page_head
from server_app.report.page.counts import COUNTS
from server_app.report.page.macros import MACROS
from server_app.report.page.pictures import PICTURES
from server_app.report.page.privacy import PRIVACY
from server_app.report.page.sites import SITES
from server_app.report.page.top import TOP

PAGE = MACROS + page_head("{{ run.method }} · {{ folder }}") + TOP + PICTURES + COUNTS + PRIVACY + SITES
