// The one plugin that DeepSeek Harness loads for rlm-kernel: it joins the harness to
// the host bridge by JSON-RPC 2.0, one object a line, over a socket that the bridge
// listens on. It serves the release lines 0.1 and 0.2 and asks what the harness can
// do, never which version it is. It keeps no state of a session and appends no
// session event: an unknown one makes a session unresumable.
import { randomUUID } from 'node:crypto'

import { BridgeError, Link, connect } from './link.mjs'

export const name = 'rlm-kernel-bridge'
export const inject = ['tools', 'agents', 'systemPrompt', 'subagents', 'llm']

const PROTOCOL = 1
const MAX_EVENT_CHARS = 2 ** 20
const HELLO_TIMEOUT_MS = 10_000
// Frozen: an aborted fetch puts a `stack` on its cause, and the session then can not
// log the end of the turn.
const CANCEL_CAUSE = Object.freeze({ kind: 'user' })
// What the bridge can not do without: a service, and its names on the release lines.
const CAPABILITIES = {
  createRoot: ['agents', 'create'],
  startChild: ['subagents', 'startContinuable', 'startActivation'],
  discardChild: ['subagents', 'drainContinuableChildren', 'drainChildren'],
  report: ['subagents', 'reportFrom', 'sendMessage'],
  registerTool: ['tools', 'register'],
  listTools: ['tools', 'schemas'],
  callTool: ['tools', 'execute'],
  promptSection: ['systemPrompt', 'section'],
  listModels: ['llm', 'listModels'],
}

// ---- what the harness says, in our words -------------------------------------------

const textOf = content => (content ?? []).filter(block => block.type === 'text').map(block => block.text).join('\n')

/** Text for an event. Events are news, not storage: an absurd length is cut, and says so. */
const clip = text => text.length <= MAX_EVENT_CHARS ? text
  : `${text.slice(0, MAX_EVENT_CHARS)}\n[${text.length - MAX_EVENT_CHARS} more characters were cut]`

const textBlocks = text => [{ type: 'text', text }]

const userMessage = text => Object.freeze({
  id: randomUUID(), role: 'user', content: textBlocks(text), source: { kind: 'user' },
})

const parentOf = agent => agent.session.header.parentSession

/** Depth by the session's lineage: the header says it, else it is counted. */
function depthOf(ctx, agent) {
  const stated = agent.session.header.delegationDepth
  if (typeof stated === 'number') return stated
  let depth = 0
  for (let at = agent; at !== undefined && parentOf(at) !== undefined && depth < 64; depth++) at = ctx.agents.get(parentOf(at))
  return depth
}

const agentInfo = (ctx, agent) => ({
  id: String(agent.id),
  parentId: parentOf(agent) === undefined ? null : String(parentOf(agent)),
  depth: depthOf(ctx, agent),
  cwd: agent.session.header.cwd ?? '',
  status: agent.status === 'idle' ? 'idle' : 'running',
})

const mailOf = message => ({
  id: String(message.id),
  senderId: message.source?.senderSessionId === undefined ? null : String(message.source.senderSessionId),
  settled: message.source?.kind === 'subagent-settled',
  text: clip(textOf(message.content)),
})

/** Which name of each capability this harness has; null for none. */
const probe = ctx => Object.fromEntries(Object.entries(CAPABILITIES).map(([capability, [service, ...names]]) => (
  [capability, names.find(method => typeof ctx[service]?.[method] === 'function') ?? null])))

// ---- what the bridge asks ----------------------------------------------------------

function agentHandlers(ctx, muted, liveAgent) {
  return {
    'agents/create': async ({ agentId, cwd, provider, model, mute }) => {
      // Muted before it is live, so that no mail can come between.
      const mutes = mute && !muted.has(agentId)
      if (mutes) muted.add(agentId)
      try {
        const { agent } = await ctx.agents.create({ sessionId: agentId, meta: { cwd }, agentOptions: { provider, model } })
        return agentInfo(ctx, agent)
      } catch (error) {
        if (mutes) muted.delete(agentId)
        throw error
      }
    },
    'agents/send': ({ agentId, text }) => { liveAgent(agentId).followup(userMessage(text)) },
    'agents/cancel': ({ agentId }) => { liveAgent(agentId).cancel(CANCEL_CAUSE, { keepInbox: true }) },
    'agents/quiet': ({ agentId }) => {
      const agent = ctx.agents.get(agentId)
      return agent === undefined
        || (agent.status === 'idle' && agent.inbox.nextTurn.length === 0 && agent.inbox.nextStep.length === 0)
    },
    'agents/route': ({ agentId }) => {
      const agent = liveAgent(agentId)
      // The options go stale when a request is rerouted; the last header does not.
      const { provider, model } = agent.session.requestHeader()?.config ?? agent.options
      return { provider, model }
    },
  }
}

function subagentHandlers(ctx, { provider, can, discarded, liveAgent }) {
  const { subagents } = ctx
  const admits = can.startChild === 'startContinuable'
    ? spec => subagents.startContinuable(spec)
    : spec => subagents.startActivation({ ...spec, delivery: 'parent' })
  const reports = can.report === 'reportFrom'
    ? (child, content, signal) => subagents.reportFrom(child, content, { delivery: 'next-step', signal })
    : (child, content, signal) => subagents.sendMessage(child, parentOf(child), content, { signal })
  const discard = async (parentId, childId) => {
    discarded.add(String(childId)) // first: its end puts a notice into the parent's inbox
    const parent = ctx.agents.get(parentId)
    // A parent that is gone has taken its children along.
    if (parent) await subagents[can.discardChild](parent, [childId])
  }
  return {
    'subagents/start': async ({ parentId, prompt, label, maxDepth, route }, signal) => {
      const parent = liveAgent(parentId)
      const depth = depthOf(ctx, parent) + 1
      const request = { parent, prompt: textBlocks(prompt), maxDepth, ...(route ? { agentOptions: route } : {}) }
      const cancelled = () => new BridgeError('CANCELLED', 'the call was cancelled; there is no child')
      const { childId } = await admits({ provider, label, signal, request }).catch(error => {
        throw signal.aborted ? cancelled() : error
      })
      // The harness looks at the signal until the prompt is accepted, and not after that.
      if (signal.aborted) {
        await discard(parentId, childId)
        throw cancelled()
      }
      const child = ctx.agents.get(childId)
      return child ? agentInfo(ctx, child)
        : { id: String(childId), parentId, depth, cwd: parent.session.header.cwd ?? '', status: 'idle' }
    },
    'subagents/discard': ({ parentId, childId }) => discard(parentId, childId),
    'subagents/report': async ({ childId, text }, signal) => String(await reports(liveAgent(childId), textBlocks(text), signal)),
  }
}

function toolHandlers(ctx, open, liveAgent) {
  return {
    'tools/list': ({ agentId }) => ctx.tools.schemas(liveAgent(agentId)),
    'tools/call': async ({ executionId, name: tool, arguments: args, number }, signal) => {
      const outer = open.get(executionId)
      if (!outer) throw new BridgeError('REQUEST_SCOPE_CLOSED', 'the tool call that this call belongs to has ended')
      const result = await ctx.tools.execute({
        callId: `${outer.callId}:py:${number}`, rootCallId: outer.rootCallId, name: tool, arguments: args,
        agent: outer.agent, parent: outer.token, signal: AbortSignal.any([outer.signal, signal]),
      })
      return {
        isError: result.isError === true,
        content: result.content ?? [],
        value: result.value ?? null,
        message: result.error?.message ?? null,
        code: result.error?.info?.code ?? null,
      }
    },
    'llm/models': async () => {
      const known = await Promise.allSettled(ctx.llm.listProviders().map(async ({ id }) => (
        (await ctx.llm.listModels(id)).map(model => ({ provider: String(id), model: String(model.id) })))))
      // A provider that can not say now, for want of a key or of a server, has none.
      return known.flatMap(list => list.value ?? [])
    },
  }
}

// ---- what the bridge is told -------------------------------------------------------

function tellEvents(ctx, emit, { muted, discarded }) {
  const attempts = new Map()
  const runs = new Map() // child id -> its run, as long as that has not ended
  const isDead = message => discarded.has(String(message.source?.senderSessionId))
  ctx.on('agent/created', ({ agent }) => emit({ kind: 'created', agent: agentInfo(ctx, agent) }))
  ctx.on('agent/disposed', ({ agent }) => {
    const agentId = String(agent.id)
    muted.delete(agentId)
    attempts.delete(agentId)
    const run = runs.get(agentId)
    // The harness disposes of a child and then tells its end; we tell the end first.
    if (run) run.disposed = true
    else emit({ kind: 'disposed', agentId })
  })
  // One event a message, so that no event can outgrow a line.
  const tellMail = (agentId, messages) => {
    for (const message of messages) if (!isDead(message)) emit({ kind: 'mail', agentId, mail: [mailOf(message)] })
  }
  // A rejected step ends the agent's driver, and what came since that step took its
  // mail would wait for the next wake: a muted root takes it out of the inbox here.
  const takeRest = agent => {
    if (agent.status !== 'idle' || ctx.agents.get(agent.id) !== agent) return
    for (const [target, waiting] of [['next-step', agent.inbox.nextStep], ['next-turn', agent.inbox.nextTurn]]) {
      const messages = [...waiting]
      if (messages.length === 0) continue
      agent.inbox.splice(target, 0, messages.length, [])
      tellMail(String(agent.id), messages)
    }
  }
  // A turn that has nothing but dead letters ends without a step, and with it the
  // agent's driver: what came meanwhile is delivered once more.
  const emptied = new Set()
  const wakeAgain = agent => {
    if (agent.status !== 'idle' || ctx.agents.get(agent.id) !== agent) return
    const { nextTurn, nextStep } = agent.inbox
    const message = nextTurn[0] ?? nextStep[0]
    if (message === undefined) return
    agent.inbox.splice(nextTurn.length > 0 ? 'next-turn' : 'next-step', 0, 1, [])
    agent.followup(message)
  }
  ctx.on('agent/status', ({ agent, status }) => {
    const agentId = String(agent.id)
    emit({ kind: 'status', agentId, status: status === 'idle' ? 'idle' : 'running' })
    // Not in the listener: the session takes no event while it tells one.
    if (status !== 'idle') return
    if (muted.has(agentId)) setImmediate(takeRest, agent)
    else if (emptied.delete(agentId)) setImmediate(wakeAgain, agent)
  })
  ctx.on('subagent/start', ({ id }) => {
    const child = ctx.agents.get(id)
    // Children outside this process have no agent here, and are not told of.
    if (child && parentOf(child) !== undefined) runs.set(String(id), { parentId: String(parentOf(child)), disposed: false })
  })
  ctx.on('subagent/end', ({ id, stopReason, lastAssistantMessage }) => {
    const agentId = String(id)
    const run = runs.get(agentId)
    if (!run) return
    runs.delete(agentId)
    emit({ kind: 'child-ended', agentId, parentId: run.parentId, stopReason, text: clip(textOf(lastAssistantMessage)) || null })
    if (run.disposed) emit({ kind: 'disposed', agentId })
  })
  ctx.on('session/event', (session, { type, data }) => {
    const agentId = String(session.id)
    if (type === 'assistant/message') {
      const text = clip(textOf(data.message.content))
      if (text) emit({ kind: 'text', agentId, text })
    } else if (type === 'turn/end') {
      const { kind: reason, error } = data.reason
      emit({ kind: 'turn', agentId, reason, error: error ? clip(String(error.message)) : null, code: error?.code ?? null })
    }
  })
  // First in line: the harness's own retry answers without asking further listeners.
  ctx.on('agent/request-error', ({ agent, turn, step, failure }, next) => {
    const agentId = String(agent.id)
    const last = attempts.get(agentId)
    const attempt = last?.turn === turn && last.step === step ? last.attempt + 1 : 1
    attempts.set(agentId, { turn, step, attempt })
    emit({ kind: 'request-failed', agentId, status: failure.status ?? null, attempt, message: clip(String(failure.message)) })
    return next()
  }, { prepend: true })
  ctx.on('agent/pre-step', async ({ agent, messages, step }, next) => {
    const agentId = String(agent.id)
    tellMail(agentId, messages)
    if (muted.has(agentId)) return { kind: 'reject' }
    if (!messages.some(isDead)) return next()
    if (step === 1 && messages.every(isDead)) {
      emptied.add(agentId)
      return { kind: 'enter', messages: [] }
    }
    // In the middle of a turn, or beside other mail, the step goes on without them.
    const decision = await next()
    return decision.kind === 'enter' ? { ...decision, messages: decision.messages.filter(message => !isDead(message)) } : decision
  }, { prepend: true })
}

/** Give failed calls of our tools what a thrown error has no place for: code and value. */
function carryFailures(ctx, failures) {
  ctx.on('tools/execute', async (exec, next) => {
    const result = await next()
    const outcome = failures.get(exec.token)
    if (!failures.delete(exec.token) || !result.isError) return result
    const info = outcome.code === null ? {} : { info: { name: 'RlmToolError', code: outcome.code } }
    return { ...result, error: { ...result.error, ...info }, meta: outcome.value }
  }, { prepend: true })
}

function registerTool(ctx, link, { open, failures }, { name: tool, description, parameters }) {
  ctx.tools.register({
    name: tool,
    description,
    parameters,
    output: { schema: {}, render: (_args, value) => textBlocks(value.text) },
    // No `isConcurrencySafe`: exclusive within a batch of tool calls.
    execute: async (args, exec) => {
      const executionId = randomUUID()
      open.set(executionId, exec)
      try {
        const outcome = await link.request('tool/execute', {
          executionId, callId: String(exec.callId), tool, arguments: args,
          agent: exec.agent ? agentInfo(ctx, exec.agent) : null,
        }, { signal: exec.signal })
        if (outcome.isError) {
          failures.set(exec.token, outcome)
          throw new Error(outcome.text)
        }
        return { ...outcome.value, text: outcome.text }
      } finally {
        open.delete(executionId) // nested calls that come later are out of scope
      }
    },
  })
}

export async function apply(ctx, { provider }) {
  const { RLM_BRIDGE_ADDRESS: address, RLM_BRIDGE_TOKEN: token } = process.env
  if (!address || !token) throw new Error(`${name}: RLM_BRIDGE_ADDRESS and RLM_BRIDGE_TOKEN are required`)
  delete process.env.RLM_BRIDGE_TOKEN // what the harness starts need not have it

  const muted = new Set() // roots that never step
  const discarded = new Set() // children that were taken back; their letters are dead
  const open = new Map() // execution id -> the open call of a tool of ours
  const failures = new Map() // execution token -> the outcome of a failed call
  const can = probe(ctx)
  const liveAgent = agentId => {
    const agent = ctx.agents.get(agentId)
    if (!agent) throw new BridgeError('AGENT_NOT_LIVE', 'the harness has no live agent of this id')
    return agent
  }
  const link = new Link(await connect(address), {
    ...agentHandlers(ctx, muted, liveAgent),
    ...subagentHandlers(ctx, { provider, can, discarded, liveAgent }),
    ...toolHandlers(ctx, open, liveAgent),
  })
  // The bridge cancels and settles what is open when it sees the link end.
  ctx.effect(() => () => link.close(), name)

  const hello = { protocol: PROTOCOL, token, capabilities: can }
  const { tools, sections } = await link.request('hello', hello, { timeoutMs: HELLO_TIMEOUT_MS })
  tellEvents(ctx, event => link.notify('event', event), { muted, discarded })
  carryFailures(ctx, failures)
  for (const tool of tools) registerTool(ctx, link, { open, failures }, tool)
  for (const section of sections) ctx.systemPrompt.section(section)
  await link.request('ready', {}, { timeoutMs: HELLO_TIMEOUT_MS })
}
