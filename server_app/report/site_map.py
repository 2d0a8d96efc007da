"""The map of the hospitals in a report: from the surrogates in the run folder."""

from __future__ import annotations

from pathlib import Path

from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.signed_models.run_folders import settings_of_run
from fedsurrogate.common.surrogates.surrogates import Surrogate
from fedsurrogate.server_app.report.plots.site_map import draw_site_map
from fedsurrogate.server_app.report.site_distances import MOST_SITES, SiteMap, site_map
from fedsurrogate.server_app.runs.reader import RunFolder, read_payloads
from fedsurrogate.strategies import stored_strategy

# Above this dimension a covariance of a site is not read for a picture.
LARGEST_DIMENSION = 4096


def site_map_of(run: RunFolder, folder: Path) -> SiteMap | None:
    """The map of a run's sites, from their stored surrogates.

    Args:
        run: the content of the run folder.
        folder: the run folder.

    Returns:
        The map; None for a run with privacy, whose noise sets random sites apart, for one that has
        none, or whose surrogates are of another kind.
    """
    if not 2 <= len(list((folder / "surrogates").glob("*.pb"))) <= MOST_SITES:
        return None
    try:
        config = settings_of_run(folder)
        if config.private or not config.plan.combination.stored or config.plan.kind != "one-shot":
            return None
        strategy = stored_strategy(config)(config)
        surrogates = strategy.in_one_frame(
            [strategy.unpack(payload) for payload in read_payloads(folder)]
        )
    except (FedSurrogateError, ValueError, TypeError):
        # A report of a damaged folder leaves the picture out.
        return None
    kept = [each for each in surrogates if isinstance(each, Surrogate)]
    kinds = {(each.dimension, each.header.fingerprint) for each in kept}
    if len(kept) < 2 or len(kinds) > 1 or kept[0].dimension > LARGEST_DIMENSION:
        return None
    return site_map(kept)


def words_of(map_of_sites: SiteMap) -> list[str]:
    """Sites that stand apart, and labels that may be swapped, in sentences; none without any."""
    far = " and ".join(
        filter(
            None, (", ".join(map(_site, map_of_sites.odd[:-1])), *map(_site, map_of_sites.odd[-1:]))
        )
    )
    sentences = [f"The surrogates of {far} are far from those of the other sites."] if far else []
    pairs = [(each.site, each.name, each.other) for each in map_of_sites.resemblances]
    for site in dict.fromkeys(site for site, _, _ in pairs):
        own = [
            f"{name} looks like {other} of the others"
            for each, name, other in pairs
            if each == site
        ]
        sentences.append(f"At {_site(site)}, {', '.join(own)}: labels may be swapped there.")
    return sentences


def _site(name: str) -> str:
    return f"site {name}" if name.isdecimal() else name


def drawn_map(map_of_sites: SiteMap) -> str:
    """The picture of a map."""
    marked = {*map_of_sites.odd, *(each.site for each in map_of_sites.resemblances)}
    return draw_site_map(map_of_sites.sites, map_of_sites.points.tolist(), marked)
