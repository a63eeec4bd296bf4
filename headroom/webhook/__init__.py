"""The admission webhook: validates and mutates GPU pods and pod templates."""
