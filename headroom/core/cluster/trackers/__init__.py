"""Follow one aspect of the cluster each; the writer passes every change to all of them."""
