// The plugin's end of the link: JSON-RPC 2.0, one object a line, both ways.
import net from 'node:net'

const MAX_LINE_BYTES = Number(process.env.RLM_BRIDGE_MAX_LINE_BYTES ?? 16 * 2 ** 20)
const MAX_UNSENT_BYTES = 4 * MAX_LINE_BYTES

/** An error with a code of ours; codes of the harness's own errors do not travel. */
export class BridgeError extends Error {
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
export class Link {
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
      // The call stays pending: the bridge settles cancelled calls too.
      const onAbort = () => this.notify('$/cancel', { id })
      const timer = timeoutMs && setTimeout(() => {
        onAbort()
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
export const connect = address => new Promise((resolve, reject) => {
  const port = /^tcp:127\.0\.0\.1:(\d+)$/.exec(address)?.[1]
  const socket = net.connect(port ? { host: '127.0.0.1', port: Number(port) } : { path: address.replace(/^unix:/, '') })
  socket.once('error', reject)
  socket.once('connect', () => {
    socket.off('error', reject)
    resolve(socket)
  })
})
