"""What a process of our own does before it loads JAX."""

import gc


def collect_garbage_seldom() -> None:
    """Look for garbage in young objects only.

    The libraries make half a million objects that live as long as the process. Going through them all again and again
    takes half a second of a start, and stops every thread for a tenth of a second at times after it.
    """
    gc.set_threshold(100_000, 50, 100)
