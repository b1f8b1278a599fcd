"""What the model says: files, weights behind views, sites, and the rewriting of the graph."""
