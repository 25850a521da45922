// The one plugin that DeepSeek Harness loads for rlm-kernel: it joins the harness to
// the host bridge by JSON-RPC 2.0, one object a line, over a socket that the bridge
// listens on. It serves the release lines 0.1 and 0.2 and asks what the harness can
// do, never which version it is. It keeps no state of a session and appends no
// session event: an unknown one makes a session unresumable.
import { randomUUID } from 'node:crypto'
import net from 'node:net'

export const name = 'rlm-kernel-bridge'
export const inject = ['tools', 'agents', 'systemPrompt', 'subagents', 'llm']

const PROTOCOL = 1
const MAX_LINE_BYTES = Number(process.env.RLM_BRIDGE_MAX_LINE_BYTES ?? 16 * 2 ** 20)
const MAX_UNSENT_BYTES = 4 * MAX_LINE_BYTES
const MAX_EVENT_CHARS = 2 ** 20
const HELLO_TIMEOUT_MS = 10_000
const DISPOSE_TIMEOUT_MS = 5_000
// Frozen: an aborted fetch puts a `stack` on its cause, and the session then can not
// log the end of the turn.
const CANCEL_CAUSE = Object.freeze({ kind: 'user' })

// ---- the link ----------------------------------------------------------------------

/** An error with a code of ours; codes of the harness's own errors do not travel. */
class BridgeError extends Error {
  constructor(code, message) {
    super(message)
    this.code = code
  }
}

const describe = error => ({
  code: -32000,
  message: String(error?.message ?? error).slice(0, 4000),
  data: {
    code: error instanceof BridgeError ? error.code
      : error?.name === 'SubagentDepthError' ? 'DEPTH_LIMIT' : null,
  },
})

const encode = message => {
  // JavaScript's strings may hold lone surrogates, which the other end refuses.
  const repair = (_key, value) => typeof value === 'string' ? value.toWellFormed() : value
  const line = Buffer.from(`${JSON.stringify(message, repair)}\n`)
  if (line.length > MAX_LINE_BYTES) {
    throw new BridgeError('PAYLOAD_TOO_LARGE', `a message of ${line.length} bytes exceeds the link's limit of ${MAX_LINE_BYTES}`)
  }
  return line
}

/** One end of the link. `handlers` maps a method to `(params, signal) => result`. */
class Link {
  #socket
  #handlers
  #pending = new Map()
  #serving = new Map()
  #parts = []
  #size = 0
  #sequence = 0
  closed = false

  constructor(socket, handlers) {
    this.#socket = socket
    this.#handlers = handlers
    socket.on('data', chunk => this.#receive(chunk))
    socket.on('error', () => this.#lose())
    socket.on('close', () => this.#lose())
  }

  request(method, params, { signal, timeoutMs } = {}) {
    const id = `p${++this.#sequence}`
    return new Promise((resolve, reject) => {
      if (this.closed) throw new BridgeError('HOST_UNAVAILABLE', 'the host bridge is gone')
      const line = encode({ jsonrpc: '2.0', id, method, params })
      const cancel = reason => this.notify('$/cancel', { id, reason })
      // The call stays pending: the bridge settles cancelled calls too.
      const onAbort = () => cancel(String(signal.reason?.kind ?? signal.reason?.message ?? 'aborted'))
      const timer = timeoutMs && setTimeout(() => {
        cancel('timeout')
        this.#pending.get(id)?.reject(new BridgeError('TIMEOUT', `${method} was not answered in time`))
      }, timeoutMs)
      const settled = act => value => {
        this.#pending.delete(id)
        signal?.removeEventListener('abort', onAbort)
        clearTimeout(timer)
        act(value)
      }
      this.#pending.set(id, { resolve: settled(resolve), reject: settled(reject) })
      signal?.addEventListener('abort', onAbort, { once: true })
      this.#write(line)
      if (signal?.aborted) onAbort()
    })
  }

  notify(method, params) {
    this.#write(encode({ jsonrpc: '2.0', method, params }))
  }

  close() {
    this.#socket.end()
    this.#lose()
  }

  #write(line) {
    if (this.closed) return
    // A bridge that reads nothing must not make the harness grow.
    if (this.#socket.writableLength > MAX_UNSENT_BYTES) this.#socket.destroy()
    else this.#socket.write(line)
  }

  #receive(chunk) {
    let start = 0
    for (let end; !this.closed && (end = chunk.indexOf(0x0a, start)) >= 0; start = end + 1) {
      if (!this.#keep(chunk.subarray(start, end))) return
      const line = Buffer.concat(this.#parts).toString('utf8')
      this.#parts = []
      this.#size = 0
      this.#accept(line)
    }
    this.#keep(chunk.subarray(start))
  }

  #keep(part) {
    this.#size += part.length
    if (this.#size > MAX_LINE_BYTES) {
      this.#socket.destroy()
      this.#lose()
      return false
    }
    this.#parts.push(part)
    return true
  }

  #accept(line) {
    let message
    try {
      message = JSON.parse(line)
    } catch {
      return // nobody's answer; the next line may be fine
    }
    if (message === null || typeof message !== 'object') return
    if (typeof message.method === 'string') {
      if (message.method === '$/cancel') this.#serving.get(message.params?.id)?.abort(new Error('cancelled by the bridge'))
      else void this.#answer(message)
      return
    }
    const call = this.#pending.get(message.id)
    if (message.error) call?.reject(new BridgeError(message.error.data?.code, message.error.message))
    else call?.resolve(message.result)
  }

  async #answer({ id, method, params }) {
    const controller = new AbortController()
    this.#serving.set(id, controller)
    let line
    try {
      const handler = this.#handlers[method]
      if (!handler) throw new BridgeError('UNSUPPORTED_REQUEST', `the plugin has no method ${method}`)
      line = encode({ jsonrpc: '2.0', id, result: await handler(params ?? {}, controller.signal) ?? null })
    } catch (error) {
      line = encode({ jsonrpc: '2.0', id, error: describe(error) })
    }
    this.#serving.delete(id)
    this.#write(line)
  }

  #lose() {
    if (this.closed) return
    this.closed = true
    this.#parts = []
    for (const call of [...this.#pending.values()]) call.reject(new BridgeError('HOST_UNAVAILABLE', 'the host bridge is gone'))
    for (const controller of this.#serving.values()) controller.abort(new Error('the host bridge is gone'))
  }
}

/** Connect to `unix:PATH` or `tcp:127.0.0.1:PORT`. */
const connect = address => new Promise((resolve, reject) => {
  const port = /^tcp:127\.0\.0\.1:(\d+)$/.exec(address)?.[1]
  const socket = net.connect(port ? { host: '127.0.0.1', port: Number(port) } : { path: address.replace(/^unix:/, '') })
  socket.once('error', reject)
  socket.once('connect', () => {
    socket.off('error', reject)
    resolve(socket)
  })
})

// ---- what the harness says, in our words -------------------------------------------

const textOf = content => (content ?? []).filter(block => block.type === 'text').map(block => block.text).join('\n')

/** Text for an event. Events are news, not storage: an absurd length is cut, and says so. */
const clip = text => text.length <= MAX_EVENT_CHARS ? text
  : `${text.slice(0, MAX_EVENT_CHARS)}\n[${text.length - MAX_EVENT_CHARS} more characters were cut]`

const textBlocks = text => [{ type: 'text', text }]

const userMessage = text => Object.freeze({
  id: randomUUID(), role: 'user', content: textBlocks(text), source: { kind: 'user' },
})

const aborted = signal => new Promise((_resolve, reject) => {
  const fail = () => reject(new BridgeError('CANCELLED', 'the call was cancelled'))
  if (signal.aborted) fail()
  else signal.addEventListener('abort', fail, { once: true })
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
    'agents/whenIdle': async ({ agentId }, signal) => { await Promise.race([liveAgent(agentId).whenIdle(), aborted(signal)]) },
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

function subagentHandlers(ctx, provider, liveAgent) {
  const { subagents } = ctx
  const admits = typeof subagents.startContinuable === 'function'
    ? spec => subagents.startContinuable(spec)
    : spec => subagents.startActivation({ ...spec, delivery: 'parent' })
  const reports = typeof subagents.reportFrom === 'function'
    ? (child, content, signal) => subagents.reportFrom(child, content, { delivery: 'next-step', signal })
    : (child, content, signal) => subagents.sendMessage(child, parentOf(child), content, { signal })
  return {
    'subagents/start': async ({ parentId, prompt, label, maxDepth, route }, signal) => {
      const parent = liveAgent(parentId)
      const depth = depthOf(ctx, parent) + 1
      const request = { parent, prompt: textBlocks(prompt), maxDepth, ...(route ? { agentOptions: route } : {}) }
      const { childId } = await admits({ provider, label, signal, request })
      const child = ctx.agents.get(childId)
      return child ? agentInfo(ctx, child)
        : { id: String(childId), parentId, depth, cwd: parent.session.header.cwd ?? '', status: 'idle' }
    },
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

function tellEvents(ctx, emit, muted) {
  const attempts = new Map()
  const runs = new Map() // child id -> its run, as long as that has not ended
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
    for (const message of messages) emit({ kind: 'mail', agentId, mail: [mailOf(message)] })
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
  ctx.on('agent/status', ({ agent, status }) => {
    const agentId = String(agent.id)
    emit({ kind: 'status', agentId, status: status === 'idle' ? 'idle' : 'running' })
    // Not in the listener: the session takes no event while it tells one.
    if (status === 'idle' && muted.has(agentId)) setImmediate(takeRest, agent)
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
  ctx.on('agent/pre-step', ({ agent, messages }, next) => {
    const agentId = String(agent.id)
    tellMail(agentId, messages)
    return muted.has(agentId) ? Promise.resolve({ kind: 'reject' }) : next()
  }, { prepend: true })
}

function registerTool(ctx, link, open, { name: tool, description, parameters }) {
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
        if (outcome.isError) throw Object.assign(new Error(outcome.text), { code: outcome.code ?? undefined })
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

  const muted = new Set()
  const open = new Map()
  const liveAgent = agentId => {
    const agent = ctx.agents.get(agentId)
    if (!agent) throw new BridgeError('AGENT_NOT_LIVE', 'the harness has no live agent of this id')
    return agent
  }
  const link = new Link(await connect(address), {
    ...agentHandlers(ctx, muted, liveAgent),
    ...subagentHandlers(ctx, provider, liveAgent),
    ...toolHandlers(ctx, open, liveAgent),
  })
  ctx.effect(() => async () => {
    await link.request('dispose', {}, { timeoutMs: DISPOSE_TIMEOUT_MS }).catch(() => {}) // leaving in any case
    link.close()
  }, name)

  const { tools, sections } = await link.request('hello', { protocol: PROTOCOL, token }, { timeoutMs: HELLO_TIMEOUT_MS })
  tellEvents(ctx, event => link.notify('event', event), muted)
  for (const tool of tools) registerTool(ctx, link, open, tool)
  for (const section of sections) ctx.systemPrompt.section(section)
  await link.request('ready', {}, { timeoutMs: HELLO_TIMEOUT_MS })
}
