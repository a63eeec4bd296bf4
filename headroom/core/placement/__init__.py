"""Makes placement decisions: parses requests, finds candidate devices, checks the fit and scores
nodes. Pure."""
