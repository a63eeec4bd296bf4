"""Pure placement decisions: parse a request, find candidate devices, check the fit, score nodes."""
