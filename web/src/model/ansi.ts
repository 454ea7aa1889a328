/** Converts terminal output: color codes become CSS classes of pieces of text. All other codes are removed. Pure. */
const SEQUENCE = /\u001b\[[0-9;?]*[ -/]*[@-~]|\u001b\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|\u001b[@-Z\\-_]/g
const COLOURS = /\u001b\[([0-9;]*)m/g
const BLACK = 30
const BRIGHT_BLACK = 90

export interface Piece {
  text: string
  /** CSS classes of the attributes: `c1` red … `c9` bright red …, `strong`, `faint`. Empty for plain text. */
  look: string
}

/** Return the final text of a line: the part after the last carriage return that is not at its end. */
const last = (line: string): string => {
  const written = line.replace(/\r+$/, '')
  return written.slice(written.lastIndexOf('\r') + 1)
}

/** Return the text of a line without escape sequences. The search looks through this text. */
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
      // Keep only the 16 terminal colors. Other colors could be unreadable on a dark page.
      if (code === 38) next.colour = isIndexed && colour !== undefined && colour < 16 ? colour : undefined
      index += isIndexed ? 2 : 4
    }
  }
  return next
}

const classes = ({ colour, isStrong, isFaint }: Look): string =>
  [colour === undefined ? '' : `c${colour}`, isStrong ? 'strong' : '', isFaint ? 'faint' : ''].filter(Boolean).join(' ')

/** Split a line into pieces of uniform color and weight. The joined texts of the pieces are the line's plain text. */
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

/** Split the pieces where each match of `wanted` begins and ends. `isMarked` is true for the pieces of a match. */
export function marked(line: readonly Piece[], wanted: string): (Piece & { isMarked: boolean })[] {
  const whole = line
    .map((piece) => piece.text)
    .join('')
    .toLowerCase()
  const needle = wanted.toLowerCase()
  if (!needle || !whole.includes(needle)) return line.map((piece) => ({ ...piece, isMarked: false }))
  const cuts: [number, number][] = []
  for (let at = whole.indexOf(needle); at >= 0; at = whole.indexOf(needle, at + needle.length)) {
    cuts.push([at, at + needle.length])
  }
  const found: (Piece & { isMarked: boolean })[] = []
  let offset = 0
  for (const piece of line) {
    const { length } = piece.text
    const inside = cuts
      .flat()
      .map((at) => at - offset)
      .filter((at) => at > 0 && at < length)
    const edges = [0, ...inside, length]
    for (let index = 0; index + 1 < edges.length; index += 1) {
      const from = edges[index]!
      const text = piece.text.slice(from, edges[index + 1])
      const at = from + offset
      if (text) found.push({ text, look: piece.look, isMarked: cuts.some(([begin, end]) => at >= begin && at < end) })
    }
    offset += piece.text.length
  }
  return found
}
