def run(cfg, folder=None, console=None, *, overrides=(), resume=False):
    from gptattn.training.precheck import check_run
    r=check_run(cfg)
    print("READY", r.cfg.variant, r.cost.params, overrides, folder)
    return {"metrics":{"val/loss":0}}
