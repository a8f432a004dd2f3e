"""Build, run, time and save compiled modules: build.py, module.py, timing.py, launches.py."""
