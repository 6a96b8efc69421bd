"""Renders one finished study: a terminal summary (`terminal.summary`) and one HTML file (`html.render`).

Both are pure functions of a `StudyRecord`: they read nothing else and write nothing.

    words       what a record says, in words and numbers, shared by both
    terminal    at most twelve lines
    trim        cuts a record to what one page can hold
    markup      escaping by construction
    svg         charts whose text keeps its size on a phone
    style       the palette and the style sheet
    sections    verdict, staircase, step, techniques
    evidence    numerics, races, the tune's own time, how to reproduce
    html        puts the page together
"""
