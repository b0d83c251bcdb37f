"""main_training.py in a folder per rank, as on two nodes: on_two_nodes.py FOLDER FLAGS."""

import os
import runpy
import sys

os.chdir(os.path.join(sys.argv.pop(1), f"node{os.environ['RANK']}"))
runpy.run_module("main_training", run_name="__main__")
