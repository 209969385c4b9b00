"""What a scheduler could do at best."""

from collections.abc import Sequence


def fewest_loads(asked: Sequence[str], places: int) -> int:
    """Returns the fewest loads with which models of one place each can answer requests in this order: whoever is asked
    for last makes room (L. A. Belady, IBM Systems Journal 5, 1966)."""
    never, loaded, loads = len(asked), dict[str, int](), 0
    following, last = [never] * len(asked), dict[str, int]()
    for i in reversed(range(len(asked))):
        following[i] = last.get(asked[i], never)
        last[asked[i]] = i
    for name, again in zip(asked, following, strict=True):
        if name not in loaded:
            loads += 1
            if len(loaded) == places:
                del loaded[max(loaded, key=lambda each: loaded[each])]
        loaded[name] = again
    return loads
