"""Pure placement decisions: parse requests, find candidate devices, check the fit, and score
nodes."""
