/** A log is decoded, coloured and read without gaps in both directions and as a stream. Each line has an address. */
import { describe, expect, test, vi } from 'vitest'

import { LogSource, type LogService } from '../src/api/logs'
import type { GetLogEventsResponse, LogEvent, LogEvents } from '../src/contract'
import { marked, pieces, plain } from '../src/model/ansi'
import { BrokenStream, EventStreamDecoder } from '../src/model/eventStream'
import {
  appended,
  asText,
  failureLine,
  hitOf,
  hits,
  lineAt,
  MOST_LINES,
  placeOf,
  prepended,
  readPlace,
} from '../src/model/logs'

const event = (Message: string, at = 0, more: Partial<LogEvent> = {}): LogEvent => ({
  Timestamp: 1772323200 + at / 1000,
  Generation: 1,
  NodeId: 'i-0',
  Rank: 0,
  Stream: 'stdout',
  Message,
  ...more,
})
const texts = (lines: { text: string }[]) => lines.map((line) => line.text)

describe('messages of an event stream', () => {
  // The bytes of a message that the function `message` of control_plane/api/event_stream.py returned.
  const MADE = Uint8Array.from(
    Buffer.from(
      '000000850000004ffa47bc8a0d3a6d6573736167652d747970650700056576656e740b3a6576656e742d747970650700094c6f674576656e74730d3a636f6e74656e742d747970650700106170706c69636174696f6e2f6a736f6e7b224576656e7473223a5b5d2c224e657874466f7277617264546f6b656e223a22c3a931227db85af13b',
      'hex',
    ),
  )
  const wanted = [{ type: 'LogEvents', payload: '{"Events":[],"NextForwardToken":"é1"}' }]
  test.each([1, 7, 13, MADE.length])('are decoded from pieces of %i bytes', (size) => {
    const decoder = new EventStreamDecoder()
    const found = []
    for (let at = 0; at < MADE.length * 2; at += size)
      found.push(...decoder.push(Uint8Array.from([...MADE, ...MADE].slice(at, at + size))))
    expect(found).toEqual([...wanted, ...wanted])
  })
  test.each([0, 5, 9, 20, MADE.length - 1])('that are damaged at byte %i are refused', (at) => {
    const damaged = Uint8Array.from(MADE)
    damaged[at]! ^= 1
    expect(() => new EventStreamDecoder().push(damaged)).toThrow(BrokenStream)
  })
})

describe('colours of a terminal', () => {
  test('split a line into pieces whose joined texts are the plain text', () => {
    const line = '\u001b[1;31mERROR\u001b[0m loss \u001b[38;5;4mnan\u001b[39m\u001b[K'
    expect(pieces(line)).toEqual([
      { text: 'ERROR', look: 'c1 strong' },
      { text: ' loss ', look: '' },
      { text: 'nan', look: 'c4' },
    ])
    expect(
      pieces(line)
        .map((piece) => piece.text)
        .join(''),
    ).toBe(plain(line))
  })
  test('other than the 16 text colours are removed with all their parameters', () =>
    expect(pieces('\u001b[38;2;1;31;2mx\u001b[48;5;1my')).toEqual([
      { text: 'x', look: '' },
      { text: 'y', look: '' },
    ]))
  test('a progress bar keeps its last state', () =>
    expect(pieces('10%\r\u001b[32m100%\r').map((piece) => piece.text)).toEqual(['100%']))
  test('a search ignores case and marks matches that contain several colours', () => {
    const found = marked(pieces('a\u001b[31mbC\u001b[0mdabc'), 'ABC')
    expect(found.map((piece) => [piece.text, piece.isMarked])).toEqual([
      ['a', true],
      ['bC', true],
      ['d', false],
      ['abc', true],
    ])
  })
})

describe('held lines', () => {
  test('are numbered continuously in both directions', () => {
    const { lines } = appended(appended([], [event('a')]).lines, [event('b')])
    expect(prepended(lines, [event('y'), event('z')]).map((line) => [line.number, line.text])).toEqual([
      [-2, 'y'],
      [-1, 'z'],
      [0, 'a'],
      [1, 'b'],
    ])
  })
  test('contain the newest state of a line that its writer overwrites', () => {
    const state = (text: string, Rank = 0) => event(text, 0, { Rank, Overwrites: true })
    const first = appended([], [event('a'), state('1%'), state('5%', 1), state('2%')]).lines
    expect(first.map((line) => line.text)).toEqual(['a', '5%', '2%'])
    const next = appended(first, [state('3%'), event('b'), state('4%')]).lines
    expect(next.map((line) => line.text)).toEqual(['a', '5%', '3%', 'b', '4%'])
    expect(prepended(next, [state('4%', 1)])).toEqual(next)
  })
  test('are limited in number: the oldest are dropped', () => {
    const many = Array.from({ length: MOST_LINES }, (_, index) => event(String(index), index))
    const held = appended([], many)
    expect(held.isCut).toBe(false)
    const { lines, isCut } = appended(held.lines, [event('new')])
    expect(isCut).toBe(true)
    expect(lines.length).toBeLessThan(MOST_LINES)
    expect(lines.at(-1)!.text).toBe('new')
    expect(lines.every((line, index) => line.number === lines[0]!.number + index)).toBe(true)
  })
  test('with equal times are dropped together, because the page requests older lines by time', () => {
    const many = Array.from({ length: MOST_LINES + 1 }, (_, index) => event(String(index), Math.floor(index / 7)))
    const { lines } = appended([], many)
    expect(lines[0]!.at).toBeGreaterThan(Math.round(many[Number(lines[0]!.text) - 1]!.Timestamp * 1000))
  })
  test('have addresses that distinguish lines with equal times', () => {
    const { lines } = appended(
      [],
      [
        event('a', 5),
        event('b', 5, { Rank: 1 }),
        event('c', 5),
        event('gap', 5, { Rank: undefined, Stream: 'gap' }),
        event('d', 9),
      ],
    )
    for (const line of lines) expect(lineAt(readPlace(placeOf(line, lines))!, lines)).toBe(line)
    expect(lineAt({ ...readPlace(placeOf(lines[2]!, lines))!, nth: 7 }, lines)!.text).toBe('c')
    expect(lineAt({ generation: 1, at: lines[0]!.at + 2, rank: 0, nth: 0 }, lines)!.text).toBe('gap')
    for (const bad of ['', '1~2', '1~x~0~0', '1~2~0~0~0', '-1~2~0~0']) expect(readPlace(bad)).toBeUndefined()
  })
  test('include the line about a failure: the last such line of the failed launch before the failure', () => {
    const incident = { FailedAt: 1772323210, GenerationBefore: 1 }
    const told = [
      event('Traceback (most recent call last):', 9_000),
      event("KeyError: 'x'", 9_001),
      event('goodbye', 9_002),
      event('RuntimeError later', 60_000),
      event('error elsewhere', 9_500, { Generation: 2 }),
    ]
    expect(failureLine(incident, appended([], told).lines)!.text).toBe("KeyError: 'x'")
    expect(failureLine(incident, appended([], [event('step 1', 1), event('step 2', 2)]).lines)!.text).toBe('step 2')
    expect(
      failureLine(incident, appended([], [event('lost', 1, { Stream: 'gap' }), event('step 2', 2)]).lines)!.text,
    ).toBe('lost')
    expect(failureLine(incident, [])).toBeUndefined()
  })
  test('match a search, and the current match stays current when older and newer lines arrive', () => {
    const { lines } = appended(
      [],
      [event('Loss 3'), event('step'), event('loss 2'), event('\u001b[31mloss\u001b[0m 1')],
    )
    const found = hits(lines, 'LOSS')
    expect(found).toEqual([0, 2, 3])
    expect([hitOf(found, undefined), hitOf(found, 2), hitOf(found, 1), hitOf([], 2)]).toEqual([3, 2, 3, undefined])
    const more = hits(appended(prepended(lines, [event('loss 5'), event('loss 4')]), [event('loss 0')]).lines, 'loss')
    expect([more.indexOf(hitOf(more, 2)!), more.length]).toEqual([3, 6])
    expect(hits(lines, '')).toEqual([])
  })
  test('are downloaded with time, launch, rank and stream', () =>
    expect(asText(appended([], [event('\u001b[31mx', 7, { Rank: 3 })]).lines[0]!)).toBe(
      '2026-03-01T00:00:00.007Z launch 1 rank 3 stdout: x\n',
    ))
})

/** A fake server with a log. A token contains the position of a line in the list `all`. */
function served(all: LogEvent[], page = 3) {
  const follows: { take: (batch: LogEvents) => void; end: () => void; cut: () => void; from: string }[] = []
  const ask: LogService = {
    page: ({ NextToken, StartTime, EndTime, StartFromHead, FilterPattern = '' }) => {
      const [kind, place] = NextToken?.split(':') ?? []
      const first = all.findIndex((each) => each.Timestamp >= (StartTime ?? 0))
      const before = EndTime === undefined ? all.length : all.filter((each) => each.Timestamp < EndTime).length
      const isForward = kind ? kind === 'f' : StartFromHead
      const at = place !== undefined ? Number(place) : isForward ? (first < 0 ? all.length : first) : before
      const [from, to] = isForward ? [at, Math.min(all.length, at + page)] : [Math.max(0, at - page), at]
      return Promise.resolve({
        Events: all.slice(from, to).filter((each) => each.Message.includes(FilterPattern)),
        NextForwardToken: `f:${to}`,
        NextBackwardToken: `b:${from}`,
      } as GetLogEventsResponse)
    },
    follow: ({ NextToken }, take, signal) =>
      new Promise((resolve, reject) => {
        follows.push({ take, end: resolve, cut: () => reject(new Error('cut off')), from: NextToken ?? '' })
        signal.addEventListener('abort', () => reject(new Error('aborted')))
      }),
    wait: () => Promise.resolve(),
  }
  return { ask, follows }
}
const LOG = Array.from({ length: 10 }, (_, index) => event(String(index), index * 10_000))

describe('a log', () => {
  test('is read from the newest line back to the first, without repeated lines', async () => {
    const source = new LogSource('gpt', {}, served(LOG).ask)
    await source.start({ at: 'end' })
    expect(texts(source.snapshot().lines)).toEqual(['7', '8', '9'])
    expect(source.snapshot()).not.toHaveProperty('isCut') // `isCut` describes a result of `appended`, not the state
    for (let tries = 0; source.snapshot().hasOlder && tries < 10; tries += 1) await source.older()
    expect(texts(source.snapshot().lines)).toEqual(LOG.map((each) => each.Message))
  })
  test('is read from a given time in both directions', async () => {
    const source = new LogSource('gpt', {}, served(LOG).ask)
    await source.start({ at: 'time', ms: 1772323200_000 + 50_000 })
    expect(texts(source.snapshot().lines)).toEqual(['2', '3', '4', '5', '6', '7'])
    expect(source.snapshot().isAtEnd).toBe(false)
    for (let tries = 0; !source.snapshot().isAtEnd && tries < 10; tries += 1) await source.newer()
    expect(texts(source.snapshot().lines).at(-1)).toBe('9')
  })
  const RARE = Array.from({ length: 200 }, (_, index) =>
    event(index === 1 || index === 190 ? `CUDA ${index}` : 'step', index * 10_000),
  )
  test('is read past pages without matches, at most `MOST_EMPTY` at once', async () => {
    const { ask, follows } = served(RARE)
    const source = new LogSource('gpt', { FilterPattern: 'CUDA' }, ask)
    await source.start({ at: 'end' })
    expect(source.snapshot()).toMatchObject({ lines: [{ text: 'CUDA 190' }], hasOlder: true, isAtEnd: true })
    source.follow()
    expect(follows[0]!.from).toBe('f:200') // the stream starts after the lines that did not match
    await source.older()
    expect(source.snapshot()).toMatchObject({ lines: [{}], hasOlder: true }) // at most `MOST_EMPTY` empty pages at once
    for (let tries = 0; source.snapshot().hasOlder && tries < 10; tries += 1) await source.older()
    expect(texts(source.snapshot().lines)).toEqual(['CUDA 1', 'CUDA 190'])
  })
  test('is read past pages without matches from a given time in both directions', async () => {
    const source = new LogSource('gpt', { FilterPattern: 'CUDA' }, served(RARE, 10).ask)
    await source.start({ at: 'time', ms: 1772323200_000 + 1_000_000 })
    expect(texts(source.snapshot().lines)).toEqual(['CUDA 1', 'CUDA 190'])
    expect(source.snapshot().isAtEnd).toBe(false)
  })
  test('without matches reports `hasOlder` until all its pages are read', async () => {
    const of = async (page: number) => {
      const source = new LogSource('gpt', { FilterPattern: 'NaN' }, served(RARE, page).ask)
      await source.start({ at: 'end' })
      return source.snapshot()
    }
    expect(await of(3)).toMatchObject({ lines: [], hasOlder: true })
    expect(await of(100)).toMatchObject({ lines: [], hasOlder: false })
  })
  test('requests older lines with the time of the oldest line that it has read', async () => {
    const { ask } = served(LOG, 1)
    const asked: Parameters<LogService['page']>[0][] = []
    const source = new LogSource(
      'gpt',
      {},
      { ...ask, page: (request, signal) => (asked.push(request), ask.page(request, signal)) },
    )
    await source.start({ at: 'time', ms: 1772323200_000 + 50_000 })
    const { EndTime } = asked.find((each) => !each.StartFromHead)!
    for (let tries = 0; tries < 2; tries += 1) await source.older()
    expect(asked.slice(2)).toMatchObject([
      { EndTime, NextToken: 'b:4' },
      { EndTime, NextToken: 'b:3' },
    ])
  })
  test('requests dropped lines by time, and then continues by token', async () => {
    const { ask, follows } = served(LOG)
    const asked: Parameters<LogService['page']>[0][] = []
    const source = new LogSource(
      'gpt',
      {},
      { ...ask, page: (request, signal) => (asked.push(request), ask.page(request, signal)) },
    )
    await source.start({ at: 'end' })
    source.follow()
    follows[0]!.take({
      Events: Array.from({ length: MOST_LINES }, (_, index) => event(String(index), 100_000 + index)),
      NextForwardToken: 'f:11',
    })
    const EndTime = (source.snapshot().lines[0]!.at + 0.5) / 1000
    for (let tries = 0; tries < 2; tries += 1) await source.older()
    expect(asked.slice(1)).toEqual([
      { TrainingJobName: 'gpt', EndTime, Limit: 1000 },
      { TrainingJobName: 'gpt', EndTime, NextToken: 'b:7', Limit: 1000 },
    ])
  })
  test('is followed from its last line until it ends, and again after an interruption', async () => {
    const { ask, follows } = served(LOG)
    const source = new LogSource('gpt', {}, ask)
    await source.start({ at: 'end' })
    source.follow()
    expect(follows[0]!.from).toBe('f:10')
    follows[0]!.take({ Events: [event('10')], NextForwardToken: 'f:11' })
    expect(source.snapshot().isLive).toBe(true)
    follows[0]!.cut()
    await vi.waitFor(() => expect(follows).toHaveLength(2))
    expect(source.snapshot().isLive).toBe(false)
    expect(follows[1]!.from).toBe('f:11')
    follows[0]!.take({ Events: [], NextForwardToken: 'f:11' })
    follows[1]!.take({ Events: [event('11')], NextForwardToken: 'f:12' })
    follows[1]!.end()
    await vi.waitFor(() => expect(source.snapshot().isOver).toBe(true))
    expect(texts(source.snapshot().lines)).toEqual(['7', '8', '9', '10', '11'])
  })
  test('that is closed ignores later lines', async () => {
    const { ask, follows } = served(LOG)
    const source = new LogSource('gpt', {}, ask)
    await source.start({ at: 'end' })
    source.follow()
    source.close()
    follows[0]!.take({ Events: [event('late')], NextForwardToken: 'f:11' })
    expect(texts(source.snapshot().lines)).not.toContain('late')
  })
  test('that cannot be read has the error in its state', async () => {
    const source = new LogSource('gpt', {}, { ...served(LOG).ask, page: () => Promise.reject(new Error('no')) })
    await source.start({ at: 'end' })
    expect(source.snapshot()).toMatchObject({ isBusy: false, error: new Error('no') })
  })
})
