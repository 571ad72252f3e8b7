"""What the prefix cache keeps below the device: in host memory, and on disk.

    device    RadixCache over KV slots, state slots, journal slots      SlotPools
      │ ▲
      ▼ │     Passage: what goes down, what comes up                    copies, named by plans
    host      RadixCache over units of one memory                       Tier
      │ ▲
      ▼ │     Passage
    disk      RadixCache over units of one file                         Tier, and a log of it

A tier is a whole prefix cache. In the lower ones a token's keys and values, a state and the rows of
a journal are made of the same units, so that one budget serves whatever is used most.
"""
