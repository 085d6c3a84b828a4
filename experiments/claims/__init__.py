"""The story's claims, one script each: what is expected beside what is measured.

python -m experiments.claims.c09_towers --out=runs/claims --preset=cpu
"""
