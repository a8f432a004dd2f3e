"""`Fuse` at every place of users' Relax pipelines: modules, places, and what each cell asserts."""
