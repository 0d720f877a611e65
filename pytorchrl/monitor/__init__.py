"""Monitor runs from another process: read the files of a run, and show the run in a terminal or on a page.

reading.py       reads the files of a run
view.py          turns the files into a typed `RunView`, which the other modules show
screen.py        draws a view in a terminal of any width (extra `cli`)
live.py          redraws the screen until the run ends or the user quits
charts.py        draws curves and bars as SVG
page.py          assembles a self-contained HTML page from views
board.py         serves a list of runs on this machine

No module of this package imports torch, writes into the directory of a run, or takes the lock of this directory.
"""
