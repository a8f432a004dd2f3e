"""Random programs of torch operators, run on a target beside torch in float64.

    draw a program -> compile with verify=False -> run -> judge -> reduce what is wrong

`python -m tvm_fusion fuzz` is `command`. A program is Python text (`program`), so that what fails
can be cut down by editing it (`reduce`) and printed as it is. Needs torch.
"""
