// A plugin of the tests: requests of agents named `rerouted…` go to another model.
export const name = 'rlm-test-reroute'
export const inject = ['agents']

export function apply(ctx, { model }) {
  ctx.on('agent/request', async ({ agent }, next) => {
    const config = await next()
    return String(agent.id).startsWith('rerouted') ? { ...config, model } : config
  })
}
