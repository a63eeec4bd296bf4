"""The admission webhook, which validates and mutates GPU pods and pod templates."""
