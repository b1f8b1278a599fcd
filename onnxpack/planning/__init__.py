"""How each product runs: which kernels, which launches, which joins. Pure functions from sites to a Plan.

sites -> families (same input) -> units (one product, alone or joined) -> candidates (kernels worth having)
      -> costs (units x candidates) -> choose (at most `budget` kernels) -> Plan (every launch written out)
"""
