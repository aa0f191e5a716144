"""What a process has mapped of the memory that deepsp's ranks of one machine share."""

FILE = "memfd:deepsp"


def mapped_files() -> int:
    """How many pieces of shared memory this process has mapped."""
    with open("/proc/self/maps") as file:
        return sum(FILE in line for line in file)


def shared_mib() -> float:
    """Of them, what is in this process's pages."""
    total, counts = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split(" ")[0]:
                counts = FILE in line
            elif counts and line.startswith("Rss:"):
                total += int(line.split()[1])
    return total / 1024
