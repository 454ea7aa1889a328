/** Text as a terminal shows it: colours as spans, without cursor moves; a line that was written over keeps its last state. Pure. */
const SEQUENCE = /\u001b\[[0-9;?]*[ -/]*[@-~]|\u001b\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|\u001b[@-Z\\-_]/g
const COLOURS = /\u001b\[([0-9;]*)m/g
const BLACK = 30
const BRIGHT_BLACK = 90

export interface Piece {
  text: string
  /** A class of app.css for each attribute: `c1` red … `c9` bright red …, `strong`, `faint`; '' where it is plain. */
  look: string
}

/** What is left of a line on a terminal once everything was written: after the last carriage return that something follows. */
const last = (line: string): string => {
  const written = line.replace(/\r+$/, '')
  return written.slice(written.lastIndexOf('\r') + 1)
}

/** A line without anything but its text: what is searched. */
export const plain = (line: string): string => last(line).replace(SEQUENCE, '')

interface Look {
  colour?: number
  isStrong: boolean
  isFaint: boolean
}

function changed(look: Look, codes: number[]): Look {
  let next = { ...look }
  for (let index = 0; index < codes.length; index += 1) {
    const code = codes[index]!
    if (code === 0) next = { isStrong: false, isFaint: false }
    else if (code === 1) next.isStrong = true
    else if (code === 2) next.isFaint = true
    else if (code === 22) next = { ...next, isStrong: false, isFaint: false }
    else if (code === 39) next.colour = undefined
    else if (code >= BLACK && code < BLACK + 8) next.colour = code - BLACK
    else if (code >= BRIGHT_BLACK && code < BRIGHT_BLACK + 8) next.colour = code - BRIGHT_BLACK + 8
    else if (code === 38 || code === 48) {
      const isIndexed = codes[index + 1] === 5
      const colour = codes[index + 2]
      if (code === 38) next.colour = isIndexed && colour !== undefined && colour < 16 ? colour : undefined // of others a reader on a dark page may see nothing
      index += isIndexed ? 2 : 4
    }
  }
  return next
}

const classes = (look: Look): string => [look.colour === undefined ? '' : `c${look.colour}`, look.isStrong ? 'strong' : '', look.isFaint ? 'faint' : ''].filter(Boolean).join(' ')

/** A line in pieces of one look each; together they are its plain text. */
export function pieces(line: string): Piece[] {
  const text = last(line)
  const found: Piece[] = []
  let look: Look = { isStrong: false, isFaint: false }
  let at = 0
  const add = (until: number) => {
    const part = text.slice(at, until).replace(SEQUENCE, '')
    if (part) found.push({ text: part, look: classes(look) })
  }
  for (const match of text.matchAll(COLOURS)) {
    add(match.index)
    look = changed(look, match[1]!.split(';').map(Number))
    at = match.index + match[0].length
  }
  add(text.length)
  return found
}

/** The same pieces, cut where `wanted` begins and ends, so that what was searched can be marked. */
export function marked(line: readonly Piece[], wanted: string): (Piece & { isMarked: boolean })[] {
  const whole = line.map((piece) => piece.text).join('').toLowerCase()
  const needle = wanted.toLowerCase()
  if (!needle || !whole.includes(needle)) return line.map((piece) => ({ ...piece, isMarked: false }))
  const cuts: [number, number][] = []
  for (let at = whole.indexOf(needle); at >= 0; at = whole.indexOf(needle, at + needle.length)) cuts.push([at, at + needle.length])
  const found: (Piece & { isMarked: boolean })[] = []
  let offset = 0
  for (const piece of line) {
    const edges = [0, ...cuts.flat().map((at) => at - offset).filter((at) => at > 0 && at < piece.text.length), piece.text.length]
    for (let index = 0; index + 1 < edges.length; index += 1) {
      const from = edges[index]!
      const text = piece.text.slice(from, edges[index + 1])
      if (text) found.push({ text, look: piece.look, isMarked: cuts.some(([begin, end]) => from + offset >= begin && from + offset < end) })
    }
    offset += piece.text.length
  }
  return found
}
