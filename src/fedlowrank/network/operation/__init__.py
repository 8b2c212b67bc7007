"""How a run over a network is watched and operated: waiting, activity, falls of validation, a site's policy."""
