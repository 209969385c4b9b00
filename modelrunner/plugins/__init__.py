"""The daemon's side of backends: finding them, and isolating their faults from other backends' models."""
