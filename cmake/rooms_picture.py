#!/usr/bin/env python3
"""The rooms of the house as a picture, out of the rooms.txt that CMake writes from its targets.

    rooms_picture.py ROOMS DOCUMENT          put it between the marks in DOCUMENT
    rooms_picture.py ROOMS DOCUMENT --check  exit status 1, and the right one, if it is not there

A room is above everything that it may include. Arrows that follow from others are left out, so a
room may include what it points at and some rooms below that; rooms.txt lists them exactly.
"""

import sys

BEGIN = "<!-- rooms: cmake --build DIR --target picture -->\n"
END = "<!-- end of rooms -->\n"
WIDTH = 96


def read_rooms(path):
    arrows, shared = {}, {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if " = " in line:
                folder, room = line.split(" = ")
                shared.setdefault(room.strip(), []).append(folder.strip().rsplit("/", 1)[1])
            elif ":" in line:
                room, targets = line.split(":")
                arrows[room] = targets.split()
    return arrows, shared


def reach(arrows, room):
    seen = set()
    open_rooms = list(arrows[room])
    while open_rooms:
        room = open_rooms.pop()
        if room not in seen:
            seen.add(room)
            open_rooms += arrows[room]
    return seen


def levels(arrows):
    level = {}

    def of(room):
        if room not in level:
            level[room] = 1 + max((of(below) for below in arrows[room]), default=-1)
        return level[room]

    for room in arrows:
        of(room)
    return level


def picture(arrows, shared):
    level = levels(arrows)
    name_width = max(map(len, arrows)) + 1
    lines = []
    for room in sorted(arrows, key=lambda room: (-level[room], room)):
        implied = set().union(*(reach(arrows, below) for below in arrows[room]))
        below = sorted(set(arrows[room]) - implied, key=lambda other: (-level[other], other))
        line = f"{level[room]:3}  {room:{name_width}}"
        line += "-> " if below else ""
        start = len(line)
        for other in below:
            if len(line) + 2 + len(other) > WIDTH:
                lines.append(line.rstrip())
                line = " " * start
            line += other + "  "
        lines.append(line.rstrip())
        if room in shared:
            lines.append(" " * 5 + "  with " + ", ".join(sorted(shared[room])))
    return "```\n" + "\n".join(lines) + "\n```\n"


def main():
    rooms, document = sys.argv[1:3]
    drawn = BEGIN + picture(*read_rooms(rooms)) + END
    with open(document, encoding="utf-8") as file:
        text = file.read()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"{document}: wants one pair of lines\n{BEGIN}{END}")
    before, rest = text.split(BEGIN)
    wanted = before + drawn + rest.split(END)[1]
    if "--check" in sys.argv:
        if text != wanted:
            sys.exit(f"{document} shows other rooms than CMake has:\n{drawn}")
    elif text != wanted:
        with open(document, "w", encoding="utf-8") as file:
            file.write(wanted)


main()
