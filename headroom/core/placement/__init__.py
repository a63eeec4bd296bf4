"""Makes placement decisions in pure functions, which parse requests, find candidate devices, check
the fit and score nodes."""
