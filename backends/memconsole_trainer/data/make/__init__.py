"""Makes datasets: one module per kind, each with a function `make` (see `maker.Make`)."""
