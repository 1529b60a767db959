"""Options, each declared once: flags, YAML keys, defaults, limits and help of placement, cache and serving."""
