"""Many runs of one command: what is done already, what it will take and can show, each run in a
process of its own. It may import `compare` and the rooms before it. Start reading at
`run_sweep.py`.
"""
