"""One module a drafter, named as the user names it; each has build(network, **options)."""
