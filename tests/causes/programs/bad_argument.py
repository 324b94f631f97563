"""The program does not know one of its arguments: all ranks end with 2."""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.parse_args()
