/**
 * Who holds what: shards down, nodes across, the thinnest protected first.
 *
 * Drawn on a canvas that is as large as what is seen of it: 256 shards on 256 nodes scroll as smoothly as 4 on 4. Every copy is in a table below, which
 * screen readers read, too.
 */
import { Button } from '@mantine/core'
import { useElementSize } from '@mantine/hooks'
import { useEffect, useMemo, useRef, useState } from 'react'

import { serverTime } from '../api/client'
import type { DescribeProtectionResponse } from '../contract'
import { bytes, count, plural } from '../model/format'
import { copies, heldWords, matrix, type Cell, type Row } from '../model/matrix'
import type { Tone } from '../model/verdict'
import { Ago, NodeLink, Status } from '../parts/Basics'

const ROW = 22
const COLUMN = 34
const LEFT = 150
const TOP = 64
const MOST_HEIGHT = 560
const WORDS: Record<Cell, string> = { own: 'owner', copy: 'copy', behind: 'behind', out: 'out of view' }
const MARKS: Record<Cell, string> = { own: '●', copy: '✓', behind: '−', out: '!' }
const TONES: Record<Cell, Tone> = { own: 'busy', copy: 'good', behind: 'warn', out: 'warn' }
const MORE_COPIES = 100

export function ProtectionMatrix({ protection }: { protection: DescribeProtectionResponse }) {
  const { nodes, rows, newest } = useMemo(() => matrix(protection), [protection])
  const { ref, width } = useElementSize()
  const canvas = useRef<HTMLCanvasElement>(null)
  const [at, setAt] = useState({ x: 0, y: 0 })
  const [pointed, setPointed] = useState('')
  const height = Math.min(MOST_HEIGHT, TOP + rows.length * ROW + 2)
  const full = { width: LEFT + nodes.length * COLUMN + 8, height: TOP + rows.length * ROW + 2 }

  useEffect(() => {
    const context = canvas.current?.getContext('2d')
    if (!context || width < 10) return
    const ratio = window.devicePixelRatio || 1
    canvas.current!.width = width * ratio
    canvas.current!.height = height * ratio
    const style = getComputedStyle(document.documentElement)
    const token = (name: string) => style.getPropertyValue(`--${name}`).trim()
    context.setTransform(ratio, 0, 0, ratio, 0, 0)
    context.clearRect(0, 0, width, height)
    context.textBaseline = 'middle'
    const firstRow = Math.floor(at.y / ROW)
    const lastRow = Math.min(rows.length, Math.ceil((at.y + height - TOP) / ROW))
    const firstColumn = Math.floor(at.x / COLUMN)
    const lastColumn = Math.min(nodes.length, Math.ceil((at.x + width - LEFT) / COLUMN))
    context.font = '12px system-ui, sans-serif'
    context.save()
    context.beginPath()
    context.rect(LEFT, TOP, width - LEFT, height - TOP)
    context.clip()
    context.textAlign = 'center'
    for (let row = firstRow; row < lastRow; row += 1) {
      for (let column = firstColumn; column < lastColumn; column += 1) {
        const cell = rows[row]!.cells.get(nodes[column]!)
        const x = LEFT + column * COLUMN - at.x
        const y = TOP + row * ROW - at.y
        context.fillStyle = cell ? token(`${TONES[cell]}-bg`) : token('card')
        context.fillRect(x, y, COLUMN - 1, ROW - 1)
        if (!cell) {
          context.strokeStyle = token('line')
          context.strokeRect(x + 0.5, y + 0.5, COLUMN - 2, ROW - 2)
          continue
        }
        context.fillStyle = token(TONES[cell])
        context.fillText(MARKS[cell], x + COLUMN / 2, y + ROW / 2)
      }
    }
    context.restore()
    context.save()
    context.beginPath()
    context.rect(0, TOP, LEFT, height - TOP)
    context.clip()
    context.textAlign = 'left'
    for (let row = firstRow; row < lastRow; row += 1) {
      const { shard, held, wanted } = rows[row]!
      const y = TOP + row * ROW - at.y + ROW / 2
      context.fillStyle = token('text')
      context.fillText(`rank ${shard.Rank}`, 0, y)
      context.fillStyle = token(held < wanted ? 'warn' : 'soft')
      context.fillText(`${held}/${wanted}`, 62, y)
      context.fillStyle = token(shard.CommittedStep < newest ? 'warn' : 'soft')
      context.fillText(shard.CommittedStep < 0 ? '–' : shard.CommittedStep < newest ? `−${count(newest - shard.CommittedStep)}` : count(shard.CommittedStep), 96, y)
    }
    context.restore()
    context.save()
    context.beginPath()
    context.rect(LEFT, 0, width - LEFT, TOP)
    context.clip()
    context.fillStyle = token('soft')
    context.font = '11px ui-monospace, monospace'
    for (let column = firstColumn; column < lastColumn; column += 1) {
      context.save()
      context.translate(LEFT + column * COLUMN - at.x + COLUMN / 2, TOP - 8)
      context.rotate(-Math.PI / 3)
      context.fillText(`…${nodes[column]!.slice(-5)}`, 0, 0)
      context.restore()
    }
    context.restore()
  }, [at, width, height, rows, nodes, newest])

  const point = (event: React.PointerEvent<HTMLDivElement>) => {
    const box = event.currentTarget.getBoundingClientRect()
    const row = rows[Math.floor((event.clientY - box.top - TOP + at.y) / ROW)]
    const node = nodes[Math.floor((event.clientX - box.left - LEFT + at.x) / COLUMN)]
    if (!row || !node || event.clientX - box.left < LEFT || event.clientY - box.top < TOP) return setPointed('')
    const cell = row.cells.get(node)
    const holder = row.shard.Holders.find((each) => each.NodeId === node)
    setPointed(`${cell ? WORDS[cell] : 'holds nothing'}: rank ${row.shard.Rank} on ${node}${holder ? `, ${heldWords(holder, serverTime())}` : ''}`)
  }
  const thin = rows.filter((row) => row.needsLook).length
  return (
    <>
      <div ref={ref} className="matrix" style={{ height }} tabIndex={0} role="group" aria-label={`Who holds which of ${rows.length} shards on ${nodes.length} nodes; ${thin} need a look`} onScroll={(event) => setAt({ x: event.currentTarget.scrollLeft, y: event.currentTarget.scrollTop })} onPointerMove={point} onPointerLeave={() => setPointed('')}>
        <div style={full}>
          <canvas ref={canvas} style={{ width, height }} aria-hidden="true" />
        </div>
      </div>
      <div className="keys">
        <span>● the owner’s own</span>
        <span>✓ {protection.ParityGroupSize === undefined ? 'copy' : 'share of parity'} that counts</span>
        <span>− behind what is committed</span>
        <span>! out of view</span>
        <span>−n: steps behind the newest</span>
        <span aria-live="off">{pointed}</span>
      </div>
      <p className="dim">{thin ? `${plural(thin, 'shard')} of ${count(rows.length)} ${thin === 1 ? 'needs' : 'need'} a look: ${thin === 1 ? 'its' : 'their'} copies come first.` : `Every shard has all its ${protection.ParityGroupSize === undefined ? 'copies' : 'shares'}, of the newest step.`}</p>
      <Copies rows={rows} newest={newest} />
    </>
  )
}

/** Every copy with its lag, when it was verified, its domain, and what is wrong with its shard; what needs a look comes first. */
function Copies({ rows, newest }: { rows: Row[]; newest: number }) {
  const found = useMemo(() => copies(rows), [rows])
  const [shown, setShown] = useState(MORE_COPIES)
  return (
    <>
      <h3 style={{ marginTop: 16 }}>Every copy</h3>
      <div className="scroll" tabIndex={0} role="region" aria-label="Every copy">
        <table className="grid stacked">
          <thead>
            <tr>
              <th>Rank</th>
              <th>Node</th>
              <th className="n">Copies</th>
              <th>Counts</th>
              <th className="n">Holds step</th>
              <th className="n">Behind</th>
              <th>Verified</th>
              <th>Failure domain</th>
              <th className="n">Size</th>
              <th>Why</th>
            </tr>
          </thead>
          <tbody>
            {found.slice(0, shown).map(({ row: { shard, held, wanted }, cell, holder }) => (
              <tr key={`${shard.Rank} ${holder.NodeId}`}>
                <td data-name="Rank">{shard.Rank}</td>
                <td data-name="Node"><NodeLink id={holder.NodeId} /></td>
                <td className={`n${held < wanted ? ' tone-warn' : ''}`} data-name="Copies">{held} of {wanted}</td>
                <td data-name="Counts"><Status tone={TONES[cell]} word={WORDS[cell]} /></td>
                <td className="n" data-name="Holds step">{holder.VerifiedStep === undefined ? '–' : count(holder.VerifiedStep)}</td>
                <td className="n" data-name="Behind">{holder.LagSteps === undefined ? '–' : plural(holder.LagSteps, 'step')}</td>
                <td className="moment" data-name="Verified"><Ago at={holder.VerifiedTime} /></td>
                <td data-name="Failure domain">{holder.FailureDomain ?? 'not known'}</td>
                <td className="n" data-name="Size">{bytes(shard.Bytes)}</td>
                <td className="reason">{shard.Reason || (shard.CommittedStep < newest ? `${plural(newest - shard.CommittedStep, 'step')} behind the other shards` : '')}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {found.length > shown && (
        <Button variant="default" size="xs" onClick={() => setShown(shown + MORE_COPIES)}>
          Show {count(Math.min(MORE_COPIES, found.length - shown))} more of {count(found.length)} copies
        </Button>
      )}
    </>
  )
}
